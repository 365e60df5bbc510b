"""Three boots of emulated guests, for what this machine's kernel and devices cannot
show: an old kernel, a new one with all the devices that the cases want, and that one
once more after its power was cut. Each case in a guest counts as one here, too."""

import os

import dax
import guest
import moves
import node_kernel
import vm
from kernels import MANAGES, in_guest, only
from moment import CRIU, need_criu
from suite import case

IN_NEW_KERNEL = (
    "cgroup-v2-backstop", "oom-order", "budget-rush-small", "dax-tier", "dax-redis", "dax-full",
    "dax-not", "node-tier", "node-huge", "node-order", "node-alloc", "node-qemu", "node-damon",
)


def can_manage(version):
    return version >= MANAGES


@case("guest-old-kernel", native=False, daemon=False, computes=True, seconds=400, takes=15)
def guest_old_kernel(run):
    names = ["kernel-without-move"]
    run.tests = in_guest(run, lambda version: not can_manage(version),
                         [["--native", *only(*names)]], names)


@case("guest-new-kernel", native=False, own_daemon=True, computes=True, seconds=900, takes=200)
def guest_new_kernel(run):
    """Its power is cut in the last case, which so says nothing; the next boot tells."""
    need_criu()
    nvdimm = os.path.join(run.directory, "nvdimm")
    with open(nvdimm, "wb") as file:
        file.truncate(guest.NVDIMM_MIB << 20)
    sent, environment = moves.send(run)
    environment += [f"{dax.NVDIMM}=1", f"STRATA_CRIU={CRIU}"]
    files = {*dax.files(run), *vm.files(run.tool("qemu-system-x86_64")), *sent}

    def boot(runs, names):
        return in_guest(run, can_manage, runs, names, environment,
                        [*guest.nodes(), *guest.with_nvdimm(nvdimm)], dax.MODULES,
                        more=files, criu=CRIU)
    run.tests = boot([only(*IN_NEW_KERNEL), only(dax.CUT)], IN_NEW_KERNEL)
    after = [dax.AFTER, "import-from-elsewhere"]
    run.tests += boot([only(*after)], after)


@case("guest-measures", native=False, daemon=False, soak=True, seconds=900)
def guest_measures(run):
    """What measures the (emulated) machine: moves to a node beside a bare loop of the
    kernel's call, what is hot by probes and by DAMON, and the kernel's own tiering beside
    Strata's."""
    for name, hardware in (("node-cost", guest.nodes()), ("node-damon", guest.nodes()),
                           ("node-beside-kernel", node_kernel.HARDWARE)):
        run.tests += in_guest(run, can_manage, [["--soak", *only(name)]], [name],
                              hardware=hardware)
