"""Boots of emulated guests, for what this machine's kernel and devices cannot show: an old
kernel, a new one with memory in two nodes, and one with an NVDIMM, once more after its power
was cut. Each case in a guest counts as one here, too."""

import os

import dax
import guest
import moves
import node_kernel
import vm
from kernels import MANAGES, in_guest, only
from moment import CRIU, need_criu
from suite import case

BEFORE_CUT = ("dax-tier", "dax-redis", "dax-full", "dax-not")
IN_TWO_NODES = (
    "cgroup-v2-backstop", "oom-order", "budget-rush-small", "node-tier", "node-huge",
    "node-order", "node-alloc", "node-qemu", "node-damon", "import-from-elsewhere",
)


def can_manage(version):
    return version >= MANAGES


@case("guest-old-kernel", native=False, daemon=False, computes=True, seconds=400, takes=15)
def guest_old_kernel(run):
    names = ["kernel-without-move"]
    run.tests = in_guest(run, lambda version: not can_manage(version),
                         [["--native", *only(*names)]], names)


@case("guest-new-kernel", native=False, own_daemon=True, computes=True, seconds=600, takes=200)
def guest_new_kernel(run):
    """To it comes what left a program of this machine."""
    need_criu()
    sent, environment = moves.send(run)
    run.tests = in_guest(run, can_manage, [only(*IN_TWO_NODES)], IN_TWO_NODES,
                         [*environment, f"STRATA_CRIU={CRIU}"], guest.nodes(), criu=CRIU,
                         more={*vm.files(run.tool("qemu-system-x86_64")), *sent})


@case("guest-dax", native=False, own_daemon=True, computes=True, seconds=600, takes=200)
def guest_dax(run):
    """Its power is cut in the last case, which so says nothing; the next boot tells."""
    need_criu()
    nvdimm = os.path.join(run.directory, "nvdimm")
    with open(nvdimm, "wb") as file:
        file.truncate(guest.NVDIMM_MIB << 20)
    files = dax.files(run)

    def boot(runs, names):
        return in_guest(run, can_manage, runs, names, [f"{dax.NVDIMM}=1", f"STRATA_CRIU={CRIU}"],
                        guest.with_nvdimm(nvdimm), dax.MODULES, more=files, criu=CRIU)
    run.tests = boot([only(*BEFORE_CUT), only(dax.CUT)], BEFORE_CUT)
    run.tests += boot([only(dax.AFTER)], [dax.AFTER])


@case("guest-measures", native=False, daemon=False, soak=True, seconds=900)
def guest_measures(run):
    """What measures the (emulated) machine: moves to a node beside a bare loop of the
    kernel's call, what is hot by probes and by DAMON, and the kernel's own tiering beside
    Strata's."""
    for name, hardware in (("node-cost", guest.nodes()), ("node-damon", guest.nodes()),
                           ("node-beside-kernel", node_kernel.HARDWARE)):
        run.tests += in_guest(run, can_manage, [["--soak", *only(name)]], [name],
                              hardware=hardware)
