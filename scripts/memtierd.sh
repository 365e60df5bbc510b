#!/usr/bin/env bash
# Builds memtierd, a rival of `make bench`, through the Go module proxy, at a
# fixed version with fixed hashes, into the user's cache; prints where it is.
# Does nothing when it is there. Nothing of it enters the repository.
set -euo pipefail

version=v0.1.1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/strata-lab
binary=$cache/memtierd

stop() {
    echo "memtierd: $*" >&2
    exit 1
}

if [ -x "$binary" ] && [ "$(cat "$binary.version" 2>/dev/null)" = "$version" ]; then
    echo "$binary"
    exit
fi
PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || stop "go is missing (Debian: golang-go)"
command -v cc >/dev/null || stop "a C compiler is missing (Debian: gcc, libc6-dev)"
mkdir -p "$cache"
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
cat >go.mod <<END
module pinned

go 1.20

require github.com/intel/memtierd $version

require (
	golang.org/x/sys v0.8.0 // indirect
	gopkg.in/yaml.v3 v3.0.1 // indirect
)
END
cat >go.sum <<'END'
github.com/intel/memtierd v0.1.1 h1:hGSN0+dzjaUkwgkJrk6B9SU4dntggXLpXgs9Dm+jfz4=
github.com/intel/memtierd v0.1.1/go.mod h1:NFDBvjoDS42gBK/c9q/CYCJ2pt/+g7UQwOOBvQli4z0=
golang.org/x/sys v0.8.0 h1:EBmGv8NaZBZTWvrbjNoL6HVt+IVy3QDQpJs7VRIw3tU=
golang.org/x/sys v0.8.0/go.mod h1:oPkhp1MJrh7nUepCBck5+mAzfO9JrbApNNgaTdGDITg=
gopkg.in/yaml.v3 v3.0.1 h1:fxVm/GzAzEWqLHuvctI91KS9hhNmmWOoWu0XTYJS7CA=
gopkg.in/yaml.v3 v3.0.1/go.mod h1:K4uyk7z7BCEPqu6E+C64Yfv1cQ7kz7rIZviUmN+EgEM=
END
GOTOOLCHAIN=local GOPATH="$work/path" GOCACHE="$work/cache" \
    go build -mod=mod -trimpath -o memtierd github.com/intel/memtierd/cmd/memtierd ||
    stop "could not be built; is the Go module proxy within reach?"
mv memtierd "$binary"
echo "$version" >"$binary.version"
echo "$binary"
