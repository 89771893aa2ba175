#!/usr/bin/env bash
# debian_packages.sh FOR PACKAGE...                installs Debian packages, as far as this machine lets it
# debian_packages.sh --into FOLDER FOR PACKAGE...  only unpacks them there, so that no service of theirs starts
# What cannot be had is said, and is no failure: the tests skip what it was for, by name.
set -uo pipefail

folder=
[ "$1" = --into ] && folder=$2 && shift 2
for=$1
shift

options=(-qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20) # no network is soon known
options+=(-o DPkg::Lock::Timeout=120)                           # another process may be installing
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)

needed() { # the packages, and those they need that this machine lacks; the packages alone if they conflict with others
  local uris
  uris=$(apt-get "${options[@]}" install --print-uris --no-install-recommends "$@" 2>/dev/null)
  [ -n "$uris" ] || uris=$(printf "_ %s\n" "$@")
  cut -d ' ' -f 2 <<<"$uris" | cut -d _ -f 1
}

install_or_unpack() {
  "${as_root[@]}" apt-get "${options[@]}" update || [ -n "$folder" ] || return # what is known may do
  if [ -z "$folder" ]; then
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get "${options[@]}" install -y --no-install-recommends "$@"
    return
  fi
  mapfile -t missing < <(needed "$@")
  mkdir -p "$folder/archives" && cd "$folder/archives" && apt-get "${options[@]}" download "${missing[@]}" || return
  for archive in *.deb; do dpkg-deb --extract "$archive" .. || return; done
}

if ! command -v apt-get >/dev/null; then
  echo "$for: there is no apt-get here; to leave nothing out, install by other means: $*" >&2
elif echo "$for: installing $* ..." && ! said=$(install_or_unpack "$@" 2>&1); then
  tail -n 5 <<<"$said" >&2
  echo "$for: they cannot be installed; run this as root: apt-get install $*" >&2
fi
exit 0
