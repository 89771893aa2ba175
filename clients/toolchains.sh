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

[ ${#packages[@]} -eq 0 ] || "$(dirname "$0")/../tests/debian_packages.sh" clients "${packages[@]}"
