#!/bin/sh
# Build a kube-apiserver for tests, once for each version, into the cache of built servers.
#
#   proving/servers/build_kube_apiserver.sh [VERSION]     prints the path of the program
#
# It needs Go and the Go module proxy; no git and no root. It takes about 8 minutes of CPU time, at
# the lowest priority. A program that is there already is not built again. The published module
# k8s.io/kubernetes names its staging modules at v0.0.0: each is replaced by v0.<minor>.<patch>.
set -eu

VERSION=${1:-1.36.3}
STAGING=v0.${VERSION#1.}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/domicile/servers
HOME_OF_IT=$CACHE/kube-apiserver-$VERSION
PROGRAM=$HOME_OF_IT/kube-apiserver

if [ -x "$PROGRAM" ]; then
	echo "$PROGRAM"
	exit 0
fi
command -v go >/dev/null || {
	echo "kube-apiserver $VERSION is not in $CACHE, and there is no Go to build it." >&2
	exit 3
}

mkdir -p "$HOME_OF_IT"
BUILD=$(mktemp -d "$HOME_OF_IT/build.XXXXXX")
trap 'rm -rf "$BUILD"' EXIT INT TERM
cd "$BUILD"
export CGO_ENABLED=0 GOWORK=off GOFLAGS="-mod=mod -p=${BUILD_JOBS:-1}"

GOFLAGS='' go mod init kube-apiserver-for-tests >/dev/null 2>&1
GOFLAGS='' go mod download -json "k8s.io/kubernetes@v$VERSION" >module.json
PUBLISHED=$(sed -n 's/.*"GoMod": "\(.*\)".*/\1/p' module.json)
GOFLAGS='' go mod edit -go="$(awk '$1 == "go" { print $2 }' "$PUBLISHED")"
grep -oE 'k8s\.io/[a-z0-9-]+ v0\.0\.0( |$)' "$PUBLISHED" | awk '{ print $1 }' | sort -u |
	while read -r module; do
		GOFLAGS='' go mod edit -replace "$module=$module@$STAGING"
	done
# Exactly the versions that Kubernetes pins: its own lines are copied.
GOFLAGS='' go mod edit -require "k8s.io/kubernetes@v$VERSION"
awk '/^require \(/ { inside = 1; next } /^\)/ { inside = 0 } inside && NF >= 2 { print $1 "@" $2 }' \
	"$PUBLISHED" | grep -v '@v0\.0\.0$' | while read -r module; do
	GOFLAGS='' go mod edit -require "$module"
done
cat >main.go <<'GO'
//go:build never

package main

import _ "k8s.io/kubernetes/cmd/kube-apiserver"
GO

nice -n 19 go list -deps k8s.io/kubernetes/cmd/kube-apiserver >/dev/null
OF_VERSION=k8s.io/component-base/version
MINOR=${VERSION#1.}
nice -n 19 go build -trimpath \
	-ldflags "-s -w -X $OF_VERSION.gitVersion=v$VERSION -X $OF_VERSION.gitMajor=1 -X $OF_VERSION.gitMinor=${MINOR%%.*}" \
	-o kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver
mv kube-apiserver "$PROGRAM"
echo "$PROGRAM"
