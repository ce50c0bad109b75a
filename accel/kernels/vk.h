// The language of kernels in GLSL 4.60 for Vulkan, memory being reached by device address. What each
// macro means is the dialect of docs/kernels.md; cl.h and cu.h have the same ones.

#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#ifdef NATIVE_MATRIX
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#endif

#include "packet_constants.h"

#define ADDRESS uint64_t
#define U64 uint64_t
#define U32X4 uvec4

#define FN
#define STRUCT(T) struct T
#define INOUT(T) inout T
#define INOUT_ARRAY(T, name, count) inout T name[count]
#define REF(name) name
#define PASS(name) name
#define UNROLL [[unroll]]
#define ROLLED [[dont_unroll]]

#define TO_F32(x) float(x)
#define TO_I32(x) int(x)
#define TO_U32(x) uint(x)
#define TO_U64(x) uint64_t(x)
#define AS_F32(x) uintBitsToFloat(uint(x))
#define AS_U32(x) floatBitsToUint(x)
#define MAKE_U32X4(a, b, c, d) uvec4(a, b, c, d)
#define MIN_I(a, b) min(int(a), int(b))
#define MAX_I(a, b) max(int(a), int(b))
#define MIN_U(a, b) min(uint(a), uint(b))
#define MAX_U(a, b) max(uint(a), uint(b))
#define HIGHEST_BIT(x) findMSB(uint(x))
#define NATIVE_QUOTIENT(a, b) ((a) / (b))
#define NATIVE_SQUARE_ROOT(a) sqrt(a)

#define VIEW(NAME, T, ALIGN, QUALIFIER)                                  \
    layout(buffer_reference, std430, buffer_reference_align = ALIGN)     \
        QUALIFIER buffer NAME { T at[]; };
VIEW(F32_VIEW, float, 4, )
VIEW(I32_VIEW, int, 4, )
VIEW(U32_VIEW, uint, 4, )
VIEW(SHARED_VIEW, uint, 4, coherent)
VIEW(SHARED_U8_VIEW, uint8_t, 1, coherent)
VIEW(SHARED_U32X4_VIEW, uvec4, 16, coherent)
VIEW(F16_VIEW, float16_t, 2, )
VIEW(U16_VIEW, uint16_t, 2, )
VIEW(U8_VIEW, uint8_t, 1, )
VIEW(U32X4_VIEW, uvec4, 16, )

// Whole addresses are made first: an index of an array has 32 bits.
#define F32_AT(p, i) F32_VIEW((p) + 4ul * uint64_t(i)).at[0]
#define I32_AT(p, i) I32_VIEW((p) + 4ul * uint64_t(i)).at[0]
#define U32_AT(p, i) U32_VIEW((p) + 4ul * uint64_t(i)).at[0]
#define U32_SHARED_AT(p, i) SHARED_VIEW((p) + 4ul * uint64_t(i)).at[0]
#define U8_SHARED_AT(p, i) uint(SHARED_U8_VIEW((p) + uint64_t(i)).at[0])
#define U32X4_SHARED_AT(p, i) SHARED_U32X4_VIEW((p) + 16ul * uint64_t(i)).at[0]
#define U32_NEAR(p, i) U32_VIEW(p).at[i]
#define U32X4_AT(p, i) U32X4_VIEW((p) + 16ul * uint64_t(i)).at[0]
#define NATIVE_F16_AT(p, i) float(F16_VIEW((p) + 2ul * uint64_t(i)).at[0])
#define NATIVE_WIDENED(bits) unpackHalf2x16(bits).x
#define U16_AT(p, i) uint(U16_VIEW((p) + 2ul * uint64_t(i)).at[0])
#define U8_AT(p, i) uint(U8_VIEW((p) + uint64_t(i)).at[0])
#define I8_AT(p, i) ((int(U8_AT(p, i)) ^ 128) - 128)
#define SET_U16(p, i, x) U16_VIEW((p) + 2ul * uint64_t(i)).at[0] = uint16_t(x)
#define SET_U8(p, i, x) U8_VIEW((p) + uint64_t(i)).at[0] = uint8_t(x)
#define SET_U8_SHARED(p, i, x) SHARED_U8_VIEW((p) + uint64_t(i)).at[0] = uint8_t(x)

#define CTX
#define CTX_ONLY
#define PASS_CTX
#define PASS_CTX_ONLY
#define GROUP_MEMORY(words) shared uint group_memory[words];
#define GROUP_VECTORS(vectors) shared uvec4 group_vectors[vectors];
#define GROUP_MEMORY_AND_VECTORS(words, vectors)                          \
    shared uint group_memory[words];                                      \
    shared uvec4 group_vectors[vectors];
#define GROUP_U32X4(i) group_vectors[i]
#define GROUP_VECTOR_WORD(i) group_vectors[(i) / 4u][(i) % 4u]
#define GROUP_U32(i) group_memory[i]
#define GROUP_I32(i) int(group_memory[i])
#define GROUP_F32(i) uintBitsToFloat(group_memory[i])
#define SET_GROUP_U32(i, x) group_memory[i] = uint(x)
#define SET_GROUP_I32(i, x) group_memory[i] = uint(x)
#define SET_GROUP_F32(i, x) group_memory[i] = floatBitsToUint(x)
#define GROUP_ADD(i, x) atomicAdd(group_memory[i], x)
#define GROUP_BARRIER barrier()
#define GLOBAL_BARRIER memoryBarrierBuffer(); barrier()

#define ITEM gl_LocalInvocationID.x
#define GROUP gl_WorkGroupID.x
#define GROUPS gl_NumWorkGroups.x

// Constants of a loaded module.
#define CHOSEN_AT_LOAD
layout(constant_id = 0) const bool native_divide = false;
layout(constant_id = 1) const bool native_root = false;
layout(constant_id = 2) const bool native_half = false;

#if NATIVE_DOT
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019],
                  id = 4450) int packed_sdot(uint a, uint b, spirv_literal int bytes);
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019],
                  id = 4452) int packed_sudot(uint a, uint b, spirv_literal int bytes);
#define NATIVE_SDOT4(a, b) packed_sdot(a, b, 0)
#define NATIVE_SUDOT4(a, b) packed_sudot(a, b, 0)
#endif

#ifdef NATIVE_MATRIX
#define LANE gl_SubgroupInvocationID
#define SUBGROUP gl_SubgroupID
#define MATRIX_ROWS coopmat<int8_t, gl_ScopeSubgroup, 16, 32, gl_MatrixUseA>
#define MATRIX_COLUMNS coopmat<int8_t, gl_ScopeSubgroup, 32, 16, gl_MatrixUseB>
#define MATRIX_SUM coopmat<int, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define LOAD_ROWS(m, at, stride) \
    coopMatLoad(m, group_vectors, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define LOAD_COLUMNS(m, at, stride) \
    coopMatLoad(m, group_vectors, at, stride, gl_CooperativeMatrixLayoutColumnMajor)
#define MULTIPLY(sum, rows, columns) sum = coopMatMulAdd(rows, columns, MATRIX_SUM(0))
#define ELEMENT(sum, e) sum[e]
#endif

#define LAUNCH_CTX
#define INPUTS launch.inputs

// What the host pushes for a launch: what the kernel reads of its packet, the addresses made, or where
// the packet is if that does not fit.
#if PUSHED_PACKET
layout(push_constant, std430) uniform LAUNCH {
    uint64_t inputs, operand[PUSHED_OPERANDS];
    uint stride[PUSHED_OPERANDS];
    int size[PUSHED_SIZES];
    float real[PUSHED_REALS];
    uint layout_, counted;
} launch;
#define PACKET_STRUCT struct PACKET
#define LOAD_PACKET
#define PACKET_FIELD(field) launch.field
#define PACKET_ADDRESS(i) launch.operand[i]
#else
layout(push_constant) uniform LAUNCH { uint64_t scratch, inputs, packets; uint index; } launch;

ADDRESS address_of(uint64_t stored) {
    const uint64_t offset = stored & OFFSET_MASK;
    if ((stored & SCRATCH_MEMORY) != 0) return launch.scratch + offset;
    return (stored & INPUT_MEMORY) != 0 ? launch.inputs + offset : offset;
}

#define PACKET_STRUCT layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer PACKET
#define LOAD_PACKET PACKET packet = PACKET(launch.packets + PACKET_BYTES * uint64_t(launch.index))
#define PACKET_FIELD(field) packet.field
#define PACKET_ADDRESS(i) address_of(packet.operand[i])
#endif

#define KERNEL(name) layout(local_size_x = GROUP_SIZE) in; void main()
#define OPEN const OP op = opened()
#define OPEN_GROUP OPEN

#include "packet.h"
