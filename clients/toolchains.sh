#!/usr/bin/env bash
# Installs what the clients of docs/clients.md are built with, as far as this machine lets it.
# What cannot be had is said, and is no failure: the tests skip that language, by name.
set -uo pipefail

packages=()
need() { # PACKAGE... -- COMMAND THAT SUCCEEDS IF THEY ARE THERE
  local wanted=()
  while [ "$1" != -- ]; do wanted+=("$1"); shift; done
  shift
  "$@" >/dev/null 2>&1 || packages+=("${wanted[@]}")
}

need nodejs npm -- npm --version
need g++ -- c++ --version
need make -- make --version
need pkg-config -- pkg-config --version
need protobuf-compiler -- protoc --version
need protobuf-compiler-grpc -- command -v grpc_cpp_plugin
need libgrpc++-dev libprotobuf-dev -- pkg-config --exists grpc++ protobuf
need golang-go -- go version
need protoc-gen-go protoc-gen-go-grpc -- command -v protoc-gen-go-grpc
need golang-google-grpc-dev golang-google-protobuf-dev golang-google-genproto-dev \
  -- test -d /usr/share/gocode/src/google.golang.org/grpc

[ ${#packages[@]} -eq 0 ] && exit 0

network=(-o Acquire::Retries=0 -o Acquire::http::Timeout=20) # none is soon known
sudo=()
[ "$(id -u)" -eq 0 ] || sudo=(sudo -n)
echo "clients: installing ${packages[*]} ..."
if ! command -v apt-get >/dev/null; then
  echo "clients: there is no apt-get here; install them by other means to run every client" >&2
elif ! "${sudo[@]}" apt-get "${network[@]}" update -qq >/dev/null 2>&1 ||
  ! "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get "${network[@]}" install -qq -y --no-install-recommends "${packages[@]}" >/dev/null 2>&1; then
  echo "clients: they cannot be installed; run this as root: apt-get install ${packages[*]}" >&2
fi
exit 0
