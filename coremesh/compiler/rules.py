"""The rules a kernel can break, by what the compilers say of it."""

_Row = tuple[str, str, str]

# Pattern, rule, advice. The first that fits counts. Named groups fill in.
_MEMORY: tuple[_Row, ...] = (
  (
    r"Allocation \(size=(?P<asked>\d+)\) would exceed memory"
    r" \(size=(?P<limit>\d+)\).*space=(?P<space>vmem|smem), .*"
    r"tag = '(?P<tag>[^']*)'",
    "A buffer must fit the {space} of a core, {limit} bytes; one ({tag}) takes"
    " {asked}.",
    "Make it smaller, or keep it in HBM and copy parts of it in.",
  ),
  (
    r"Allocation \(size=(?P<asked>\d+)\) would exceed memory"
    r" \(size=(?P<limit>\d+)\).*space=sflag",
    "The semaphores of a kernel must fit the semaphore memory of a core,"
    " {limit} bytes at 4 a semaphore; they take {asked}.",
    "Ask for fewer: reuse one after its wait instead of one for each copy.",
  ),
  (
    r"Scoped allocation with size (?P<asked>[\d.]+\w) and limit"
    r" (?P<limit>[\d.]+\w) exceeded scoped vmem limit",
    "What a kernel holds in VMEM at once must fit its scoped limit: {asked} are"
    " needed, {limit} are allowed.",
    "Use smaller blocks or values, or raise the limit, which is far below the"
    " memory's size by default:"
    " pltpu.CompilerParams(vmem_limit_bytes=...).",
  ),
  (
    r"Ran out of memory in memory space vmem\. Used (?P<asked>[\d.]+\w) of"
    r" (?P<limit>[\d.]+\w) vmem",
    "The blocks and buffers of a kernel must fit VMEM: {asked} are needed,"
    " {limit} are there.",
    "Use smaller blocks; each is held twice unless"
    " pipeline_mode=pl.Buffered(1).",
  ),
  (
    r"CompileTimeHbmOom.*\((?P<asked>[\d.]+\w)\) exceeds available HBM"
    r" \((?P<limit>[\d.]+\w)\)",
    "The program must fit the HBM of a device: {asked} are needed for"
    " intermediate results, {limit} are there.",
    "Shard it over more devices, or compute it in parts.",
  ),
  (
    r"CompileTimeSparseCoreAllocationFailure: .*\((?P<asked>\d+) words\)"
    r" exceeds .*\((?P<limit>\d+) words\) in memory space (?P<space>\w+)",
    "The buffers of all subcores of a SparseCore must fit its shared {space},"
    " {limit} words of 32 bits; they reach {asked}.",
    "Make the buffers of a subcore smaller: there are as many as subcores.",
  ),
  (
    r"Scratch memref allocation only supported for (?P<spaces>[\w, ]+)\.",
    "Scratch must be in {spaces}.",
    "Pass an array in HBM as an operand, or as an output that nobody reads.",
  ),
)
_ALIGNMENT: tuple[_Row, ...] = (
  (
    r"Offsets along tiled dimensions must be aligned to tiles.*index at"
    r" dimension (?P<axis>\d+) is divisible by the tile dimension"
    r" (?P<tile>\d+)",
    "A slice that is copied must start at a multiple of the tile: {tile} along"
    " axis {axis}.",
    "Move the start, or state that it is a multiple:"
    " pl.multiple_of(start, {tile}). Or copy whole tiles and take the part in"
    " VMEM.",
  ),
  (
    r"cannot statically prove that index in dimension (?P<axis>\d+) is a"
    r" multiple of (?P<tile>\d+)",
    "A load or store must start at a multiple of {tile} along axis {axis}, and"
    " the compiler must be able to see it.",
    "State it, pl.multiple_of(start, {tile}); or load whole tiles and"
    " pltpu.roll them.",
  ),
  (
    r"contiguous inner slice in the DMA transfer must be divisible by"
    r" (?P<num>\d+) bytes",
    "The innermost run of elements of a copy must be a multiple of {num} bytes"
    " long.",
    "Copy a multiple of 128 elements of 32 bits along the last axis.",
  ),
  (
    r"last two dimensions of your block shape are divisible by (?P<rows>\d+)"
    r" and (?P<columns>\d+).*Block spec for (?P<which>\S+) .*array shape"
    r" (?P<shape>\([\d, ]+\))",
    "The last two sizes of a block must be multiples of {rows} and {columns},"
    " or those of the array; the block of {which} is not (array {shape}).",
    "Change the block shape, or pad the array.",
  ),
  (
    r"requires that rank 1 block shapes.*Block spec for (?P<which>\S+) ",
    "A block of one axis must be the whole array, a multiple of 1024 elements,"
    " or a power of two of at least 128; that of {which} is not.",
    "Change the block shape, or give the array two axes.",
  ),
  (
    r"last dim size is not 128 in original base memref",
    "A load with a stride needs an array whose last size is 128.",
    "Load all and select, or give the array a last axis of 128.",
  ),
  (
    r"unsupported shape cast",
    "A reshape in a kernel must keep the last axis, or split and join it at"
    " multiples of 128.",
    "Reshape outside the kernel, or pad the last axis to a multiple of 128.",
  ),
  (
    r"DMA source and target shape mismatch",
    "Both ends of a copy must have the same shape.",
    "Slice the larger: ref.at[pl.ds(start, size)].",
  ),
  (
    r"expected slice size \((?P<given>\d+)\) to be aligned with \w+"
    r"(?: \([^)]*\))? tiling \((?P<tile>\d+)\)",
    "A copy by a vector of indices moves rows of a multiple of {tile} elements;"
    " got {given}.",
    "Pad the last axis to a multiple of {tile} outside the kernel.",
  ),
)
_DTYPES: tuple[_Row, ...] = (
  (
    r"DMA source and target element type mismatch"
    r".*?: \(memref<(?:[\d?]+x)*(?P<source>\w+),"
    r".*?memref<(?:[\d?]+x)*(?P<target>\w+),",
    "Both ends of a copy must have elements of the same type; got {source} and"
    " {target}.",
    "A copy casts nothing: cast outside the kernel, or give the scratch the"
    " type of what is copied into it.",
  ),
  (
    r"to not contain X\{64\|128\} element types|X64 element types",
    "A TPU kernel holds no elements of 64 bits.",
    "Cast to 32 bits outside the kernel, or leave jax_enable_x64 off.",
  ),
  (
    r"Unsupported matmul (?P<side>\w+) type on target: (?P<type>\S+)",
    "The matrix unit of this chip multiplies no {type} ({side}).",
    "Cast both operands to bfloat16, or compile for a chip that has it: see"
    " `coremesh chips`.",
  ),
  (
    r"float acc with int \w+\. Expected float \w+",
    "A matrix product of integers is an integer.",
    "Use preferred_element_type=jnp.int32 and cast the result.",
  ),
  (
    r"Conversion to (?P<bits>\d+)-bit not supported before (?P<chip>\w+)",
    "This chip casts nothing to {bits}-bit floats; {chip} does.",
    "Cast outside the kernel, or use int8 or float8.",
  ),
  (
    r"Only vector<i16> and vector<i32> are supported, but got '(?P<type>\w+)'",
    "Integer arithmetic in a kernel needs 16 or 32 bits; got {type}.",
    "Cast first: x.astype(jnp.int32).",
  ),
  (
    r"Invalid vector type for load.*x(?P<type>[a-z]+\d+), #tpu",
    "A kernel on this chip cannot load {type}.",
    "Use bfloat16 or float32; cast outside the kernel.",
  ),
  (
    r"failed to legalize operation '\w+\.(?P<op>\w+)':"
    r"[^\n]*?: \((?P<types>(?!memref)[^)]*)\)",
    "The chip has no instruction {op} for {types}.",
    "Cast the operands to 32 bits first.",
  ),
  (
    r"failed to verify 'elementType': VectorElementTypeInterface",
    "A kernel holds real numbers and integers only.",
    "Pass the real and the imaginary part as two arrays.",
  ),
  (
    r"Only arrays with 32-bit element types can be converted to scalars, but"
    r" got: (?P<type>\w+)",
    "A scalar in a kernel has 32 bits; got {type}.",
    "Cast the array to 32 bits before taking the element.",
  ),
)
_OPERATIONS: tuple[_Row, ...] = (
  (
    r"Unimplemented primitive in Pallas TPU lowering for (?P<core>\w+):"
    r" (?P<op>\w+)",
    "A kernel on this kind of core ({core}) has no operation {op}.",
    "Write it with others, or compute it outside the kernel.",
  ),
  (
    r"Only take_along_axis-like gathers supported",
    "A kernel on a TensorCore gathers along one axis only, element by element.",
    "Use jnp.take_along_axis; or gather rows by copies, or on a SparseCore.",
  ),
  (
    r"Scan with (?P<num>\d+) extensive output",
    "A jax.lax.scan in a kernel returns its carry only.",
    "Store each result to a ref in a pl.loop.",
  ),
  (
    r"Cannot store scalars to VMEM",
    "A store to VMEM takes a vector; a scalar goes to SMEM.",
    "Store an array, o[pl.ds(i, 1), :] = ..., or put the output in SMEM.",
  ),
  (
    r"Can only load scalars from SMEM",
    "A load from SMEM takes one element.",
    "Index every axis, or put the operand in VMEM.",
  ),
  (
    r"(?:Loads|Loads and stores) are only allowed on VMEM and SMEM",
    "A kernel computes on VMEM and SMEM; the operand is in HBM (memory space"
    " ANY).",
    "Copy it into scratch first: cm.copy or pltpu.sync_copy.",
  ),
  (
    r"memref_slice' op operand #\d+ must be variadic of 32-bit",
    "A TensorCore copies no rows by a vector of indices.",
    "Copy row by row in a pl.loop, or gather on a SparseCore.",
  ),
  (
    r"vector types must have positive constant sizes",
    "A vector must have at least one element.",
    "Return early for an empty array, before the kernel.",
  ),
  (
    r"expected input argument to be of type memref<0x|Failed to verify layout"
    r" for Mosaic kernel operand \d+.*of shape \w+\[(?:\d+,)*0[\],]",
    "An operand of a kernel must have at least one element.",
    "Leave it out, or pad it.",
  ),
)
_CORES: tuple[_Row, ...] = (
  (
    r"SparseCore is not available on the current device \((?P<chip>\w+)\)",
    "{chip} has no SparseCores.",
    "Compile for v5p, v6e or tpu7x, or write the kernel for TensorCores.",
  ),
  (
    r"Core-parallel dimension (?P<axis>\d+) has iteration bound:"
    r" (?P<asked>\d+), which is greater than the number of active cores:"
    r" (?P<limit>\d+)",
    "A kernel runs on at most the cores a device has, {limit}; axis {axis} asks"
    " for {asked}.",
    "Take the mesh from the chip, chip.tensor_cores() or"
    " chip.vector_subcores(); a longer grid axis is 'parallel'.",
  ),
  (
    r"collective_id has to be specified when using a custom barrier",
    "A kernel that uses the barrier semaphore needs a collective_id.",
    "Pass pltpu.CompilerParams(collective_id=...), or use cm.kernel, which"
    " chooses one.",
  ),
  (
    r"collective_id has to be unspecified or None when not using a custom",
    "A kernel that does not use the barrier semaphore has no collective_id.",
    "Leave collective_id out.",
  ),
  (
    r"len\(grid\)=(?P<grid>\d+), len\(dimension_semantics\)=(?P<given>\d+)",
    "There must be one of dimension_semantics for each of the {grid} axes of"
    " the grid; there are {given}.",
    "Give as many.",
  ),
  (
    r"infer-vector-layout pass\. Set needs_layout_passes=False"
    r'.*?"tpu\.(?P<op>\w+)"',
    "On a SparseCore the operation {op} needs kernels whose vectors have the"
    " shape of a register.",
    "Pass pltpu.CompilerParams(needs_layout_passes=False), and use vectors of"
    " the subcore's lanes: chip.sparse_core_lanes.",
  ),
  (
    r"Get only supports (?P<type>\w+) arrays of shapes (?P<shapes>\[.*?\]), got"
    r" (?P<given>\(.*?\))",
    "Without layout passes a SparseCore's vector of {type} must have one of the"
    " shapes {shapes}; got {given}.",
    "Take that many elements at a time, pl.ds(i, lanes), in a loop.",
  ),
  (
    r"Get only supports loading scalars from SMEM",
    "A subcore loads vectors from VMEM, not scalars.",
    "Load a vector and take an element, ref[pl.ds(i, lanes)][0]; or use SMEM.",
  ),
  (
    r"Get does not support loading from HBM",
    "A subcore computes on its own memory; the operand is in HBM.",
    "Copy it into scratch first: cm.copy or pltpu.sync_copy.",
  ),
  (
    r"does not support transfers .*from local hbm to local (?P<to>\w+) issued"
    r" from (?P<core>\w+)",
    "A vector subcore ({core}) copies nothing from HBM to its SMEM.",
    "Copy to VMEM and read elements from there, or use a scalar subcore.",
  ),
)
TABLE = _MEMORY + _ALIGNMENT + _DTYPES + _OPERATIONS + _CORES
