"""Whether a Gluon kernel's mbarriers keep their shared memory to themselves until the kernel's end.

Triton gives the memory of what is read no more to what is allocated later, a barrier's too, though PTX wants it invalidated first.
When a card changes from one process to another in the middle of a kernel, it rewrites such barriers, and so eight bytes of whatever has
their memory: NaN in a tile of values (docs/lab_notes.md, "lost rows of o").
"""

from __future__ import annotations

import re
import tempfile

ALLOCATED = re.compile(
    r"(%\w+) = ttg\.local_alloc \{allocation\.offset = (\d+) : i32\} : \(\) -> !ttg\.memdesc<([\dx]+)x(\w+),"
)
INDEXED = re.compile(r"(%\w+) = ttg\.memdesc_index (%\w+)\[")
TO_THE_END = ("ttg.warp_specialize(", "ttng.inval_barrier")


def short_barriers(ttgir: str, capability: tuple[int, int]) -> list[str]:
    """The barriers, by name, whose memory may hold something else before the kernel ends."""
    lines = _with_offsets(ttgir, capability).splitlines()
    views: dict[str, str] = {}  # name of a barrier, name of what was allocated
    last: dict[str, int] = {}  # number of the line that keeps it to the end
    inits: set[str] = set()
    memory: dict[str, range] = {}
    scratch = 0  # number of the last line that takes shared memory
    for i, line in enumerate(lines):
        if "allocation.offset" in line:
            scratch = i
        if found := ALLOCATED.search(line):
            name, offset, sizes, kind = found.groups()
            size = int(re.sub(r"\D", "", kind)) // 8
            for n in sizes.split("x"):
                size *= int(n)
            memory[name] = range(int(offset), int(offset) + size)
            views[name] = name
        elif (found := INDEXED.search(line)) and found[2] in views:
            views[found[1]] = views[found[2]]
        used = [views[name] for name in re.findall(r"%\w+", line) if name in views]
        if "ttng.init_barrier" in line:
            inits.update(used)
        if any(word in line for word in TO_THE_END):
            last.update(dict.fromkeys(used, i))
    assert inits or "mbarrier" not in ttgir, "no barrier was found in the text"
    dead = {name for name in inits if name not in last}
    # invalidated before something else is allocated
    dead |= {name for name in inits & set(last) if "inval" in lines[last[name]] and last[name] < scratch}
    shared = {
        name
        for name in inits
        for other, place in memory.items()
        if other != name and max(place.start, memory[name].start) < min(place.stop, memory[name].stop)
    }
    return sorted(dead | shared)


def _with_offsets(ttgir: str, capability: tuple[int, int]) -> str:
    """A kernel's TTGIR after Triton's own passes have placed what lies in shared memory."""
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    try:
        passes.ttgpuir.add_allocate_warp_groups(manager)
    except TypeError:  # Triton 3.8 asks whether its sanitizer of barriers is on
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability[0] * 10 + capability[1], 86)
    manager.run(module, "place_shared_memory")
    return str(module)
