"""Memory in very many small mappings (tests/programs/small.c), and mappings that are
not managed and stay as they are."""

from suite import case


def register(name, *arguments):
    @case(name, seconds=90)
    def body(run):
        run.run(*arguments, budget="24MiB")


register("small-mappings", "small", "16")
register("smallest-mappings", "small", "4")


@case("unmanaged-kinds")
def unmanaged_kinds(run):
    """Shared memory, files, /dev/zero, code, and a few small mappings."""
    run.run("kinds", budget="20MiB")
