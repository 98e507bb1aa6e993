#!/bin/sh
# Install libfaketime, with which tests step the wall clock of one server: Debian's package of that name.
#
#   proving/servers/install_libfaketime.sh     prints the path of the library
#
# It needs root, apt and a mirror. Exit code 3: one of them is missing, and the library is not here.
set -eu

LIMIT_S=90
found() {
	for place in /usr/lib/*/faketime/libfaketime.so.1 /usr/lib/faketime/libfaketime.so.1; do
		[ -e "$place" ] && echo "$place" && return 0
	done
	return 1
}

found && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "libfaketime is not here, and only root can install it with apt-get." >&2
	exit 3
fi
export DEBIAN_FRONTEND=noninteractive
install() { timeout "$LIMIT_S" apt-get install -qq -y --no-install-recommends libfaketime >/dev/null 2>&1; }
install || { timeout "$LIMIT_S" apt-get update -qq >/dev/null 2>&1 && install; } || true
found || {
	echo "libfaketime could not be installed: no mirror of Debian answers." >&2
	exit 3
}
