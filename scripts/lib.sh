# shellcheck shell=bash
# What scripts/test and scripts/bench share: set up, configure, build. To be sourced.

HOCCL_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Progress goes to standard error: standard output is for results.
say() { printf 'hoccl: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# Prints the Debian package of each thing the build needs and does not find, one a line.
missing_packages() {
  local command
  for command in g++:build-essential make:build-essential cmake:cmake ninja:ninja-build \
    ccache:ccache python3:python3-minimal; do
    command -v "${command%%:*}" >/dev/null || echo "${command#*:}"
  done
  local packages=("spdlog/spdlog.h libspdlog-dev" "fmt/format.h libfmt-dev" "CLI/CLI.hpp libcli11-dev"
    "nlohmann/json.hpp nlohmann-json3-dev" "gtest/gtest.h libgtest-dev"
    "infiniband/verbs.h libibverbs-dev")
  local package
  if command -v g++ >/dev/null; then
    # One run of the preprocessor: a line with the package's name for each header it does not find.
    for package in "${packages[@]}"; do
      printf '#if !__has_include(<%s>)\nMISSING %s\n#endif\n' "${package% *}" "${package#* }"
    done | g++ -E -P -x c++ - | sed -n 's/^MISSING //p' | tr -d ' '
  else
    for package in "${packages[@]}"; do echo "${package#* }"; done
  fi
}

# install_packages PACKAGE…: with apt, or a message that says what to do.
install_packages() {
  if ! command -v apt-get >/dev/null; then
    die "missing, and there is no apt-get here; install what Debian calls: $*"
  fi
  if [ "$(id -u)" != 0 ]; then
    die "missing packages; as root run: apt-get update && apt-get install -y $*"
  fi
  say "installing $*"
  {
    apt-get update -q &&
      DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
  } </dev/null >&2 || die "apt-get could not install: $*"
}

# What the RDMA lab needs (docs/rdma-lab.md). Where it cannot be had, its tests are skipped.
prepare_rdma_lab() {
  local missing=() program
  for program in qemu-system-x86_64:qemu-system-x86 ibv_devinfo:ibverbs-utils ib_write_bw:perftest \
    rdma:iproute2; do
    command -v "${program%%:*}" >/dev/null || missing+=("${program#*:}")
  done
  # The rxe driver of libibverbs, which no program's package depends on.
  [ -e /etc/libibverbs.d/rxe.driver ] || missing+=(ibverbs-providers)
  # python3-minimal lacks these.
  python3 -c 'import json, lzma, tarfile' 2>/dev/null || missing+=(python3)
  if [ "${#missing[@]}" != 0 ] && [ "$(uname -m)" = x86_64 ] && [ "$(id -u)" = 0 ]; then
    (install_packages "${missing[@]}") || true
  fi
  "$HOCCL_ROOT/test/rdma-lab/guest" --prepare >&2 || say "the tests in soft-RoCE guests will be skipped"
}

# Packages and headers: everything before cmake.
set_up() {
  local missing
  mapfile -t missing < <(missing_packages | sort -u)
  [ "${#missing[@]}" = 0 ] || install_packages "${missing[@]}"
  "$HOCCL_ROOT/scripts/fetch-headers" >&2
}

# configure PRESET
configure() {
  local options=()
  if command -v ccache >/dev/null; then
    options=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  (cd "$HOCCL_ROOT" && cmake --preset "$1" "${options[@]}") </dev/null >&2 ||
    die "cmake could not configure the preset '$1'"
}

# build PRESET [TARGET…]
build() {
  local preset=$1
  shift
  local targets=()
  [ $# = 0 ] || targets=(--target "$@")
  (cd "$HOCCL_ROOT" && cmake --build --preset "$preset" -j "$(nproc)" "${targets[@]}") \
    </dev/null >&2 || die "the build of preset '$preset' failed"
}
