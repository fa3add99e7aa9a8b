#!/usr/bin/env bash
# Installs what building and testing need, on Debian and Ubuntu. The list below is the one place that names it.
# Does nothing, quickly, when all is there. Without the right to install it says what is missing and stops.
set -u

PACKAGES="
gcc make pkg-config libc6-dev
clang clang-format
libzmq3-dev libmsgpack-dev libsystemd-dev libpcre2-dev libutf8proc-dev libjansson-dev libyajl-dev libxxhash-dev
libcmocka-dev
python3 python3-pip unzip ca-certificates
"

missing() { # names of the list that are not installed
    local have
    have=$(dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^ii *//p')
    for p in "$@"; do grep -qxF "$p" <<<"$have" || echo "$p"; done
}

# The sanitizers' and fuzzer's runtime of the distribution's clang; older releases keep it in another package.
clang_runtime() {
    local version p
    version=$(dpkg-query -W -f='${Depends}' clang 2>/dev/null || apt-cache depends clang 2>/dev/null)
    version=$(sed -n 's/.*clang-\([0-9]\{1,\}\).*/\1/p' <<<"$version" | head -n 1)
    [ -n "$version" ] || return 0
    for p in "libclang-rt-$version-dev" "libclang-common-$version-dev"; do
        if [ -z "$(missing "$p")" ] || apt-cache show "$p" >/dev/null 2>&1; then echo "$p"; return; fi
    done
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "make deps: this is no Debian or Ubuntu system; install by its own means what corresponds to:" >&2
    echo $PACKAGES "and clang's sanitizer runtime" >&2
    exit 1
fi

# Without package lists the runtime's name is not known yet: then it comes with the second look below.
wanted=$(missing $PACKAGES $(clang_runtime))
[ -n "$wanted" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root=sudo
else
    echo "make deps: these packages are missing, and only root can install them:" >&2
    echo $wanted >&2
    exit 1
fi

install() {
    echo "make deps: installing" $*
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

$as_root apt-get update || exit 1
install $wanted || exit 1
wanted=$(missing $(clang_runtime))
[ -z "$wanted" ] || install $wanted
