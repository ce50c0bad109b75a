// FLASH_ATTN_BATCHED of many tokens over I12 pages by products of warp groups (rule R6, sm_90a). A
// row is one head of one token. A block computes 128 rows of one KV head for a few consecutive
// tokens of one slot, and passes over the tiles that these tokens see; of a head of 256 it computes
// half of the outputs, and the sums of earlier spans are in these. Four warps load tiles and
// split them into planes of bytes; two groups of four warps multiply 64 rows each. Queries and
// weights are split into 256 high + low. A token that is the only one of its slot would leave most
// rows empty, so its heads are computed separately, after all others.
//
// HEAD_DIM is 64, 128 or 256. MAX_TOKENS is the number of tokens of the shape bucket. Compiled with
// these operand numbers (see packets.h): Q_AT, KV_AT, PAGES_AT, QUERY_AT and Y_AT.

#define WARPS 8  // that multiply
#define TOKEN_BARRIER part_barrier<WARPS * 32>()

#include "groups.h"
#include "attention_rounds.h"
#include "attention_products.h"

#define GROUP_ROWS 64
#define ROWS (GROUP_ROWS * WARPS / GROUP_WARPS)
#define THREADS ((WARPS + SUPPLY_WARPS) * WARP_LANES)
// A block has as many as all threads begin with.
#define USER_REGISTERS 240
#define SUPPLY_REGISTERS 24

#define AT_TOTALS AT_RING_END       // [value][thread that multiplies]
#define AT_LOW_QUERIES AT_RING_END  // of heads in parts, which have no totals: [group]
#define LOW_QUERIES (GROUP_ROWS * HEAD_DIM)
#define AT_ROWS_END \
    (AT_RING_END + (HEAD_PARTS > 1 ? ROWS * HEAD_DIM : VALUES * WARPS * WARP_LANES * 4))
#define AT_BARRIERS (AT_ROWS_END > AT_GROUPS_END ? AT_ROWS_END : AT_GROUPS_END)
#define AT_STARTS (AT_BARRIERS + RING_BARRIERS * 8)

// Where a lane's sums of earlier spans are, of heads in parts the outputs of its two rows, from the
// block's channels on, 0 if there is no such row.
struct ROW_TOTALS {
    float *totals, *y[2];

    __device__ __forceinline__ void find(const BLOCK_WORK &work, const HEAD_ROWS &operands,
                                         unsigned row, int t) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            y[r] = row + 8 * r < work.rows() ? operands.y_of(work, row + 8 * r) +
                                                   work.part * BLOCK_CHANNELS + 2 * t
                                             : 0;
    }
    __device__ __forceinline__ bool has(int i) const { return HEAD_PARTS == 1 || y[i / 2 % 2]; }
    __device__ __forceinline__ float *of(int i) const {
        return HEAD_PARTS > 1 ? y[i / 2 % 2] + i / 4 * 8 + i % 2 : totals + i * WARPS * WARP_LANES;
    }
};

// Ends a span: `totals` has the sum of earlier spans.
DEVICE void end_span(ROW_PAIR &rows, const ROW_TOTALS &totals, bool first) {
    FACTORS factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        factors[r] = merge_later(rows.total[r], rows.span[r]);
        rows.span[r] = no_softmax();
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        if (!totals.has(i)) continue;
        float *to = totals.of(i);
        const float before = first ? 0.0f : *to * factors[i / 2 % 2].keep;
        rows.sum[i] = __fmaf_rn(rows.sum[i], factors[i / 2 % 2].add, before);
        *to = rows.sum[i];
    }
}

DEVICE void store_rows(const ROW_PAIR &rows, const ROW_TOTALS &totals) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!totals.y[r]) continue;
        const float total = rows.broken[r] ? nan_value() : rows.total[r].total;
#pragma unroll
        for (int n = 0; n < BLOCK_CHANNELS / 8; n++) {
            const int i = 4 * n + 2 * r;
            *(float2 *)(totals.y[r] + 8 * n) = {attention_output(*totals.of(i), total),
                                                attention_output(*totals.of(i + 1), total)};
        }
    }
}

// The positions that all rows of a block see: after `first` and up to `nearest`.
struct WHOLE_RANGE {
    unsigned first, nearest;

    __device__ __forceinline__ void find(const BLOCK_WORK &work, unsigned window) {
        first = 0, nearest = 0xFFFFFFFFu;
        for (unsigned i = threadIdx.x % WARP_LANES; i < work.count; i += WARP_LANES) {
            const unsigned position = work.position(work.begin + i);
            nearest = min(nearest, position), first = max(first, first_visible(position, window));
        }
        nearest = smallest_of_warp(nearest), first = largest_of_warp(first);
    }
    // Whether a row sees less than all of the tile.
    __device__ __forceinline__ bool is_edge(unsigned start) const {
        return start + KV_TILE - 1 > nearest || start < first;
    }
};

// Adds tiles to a span; `first_value` bytes of values of a page are those of other blocks. The scores of the next tile begin as soon as the values of a tile are done.
DEVICE void attend_tiles(const TILE_RING &ring, const WHOLE_RANGE &whole, ROW_PAIR &rows,
                         unsigned first_value, unsigned tile, unsigned end, unsigned &number,
                         int t) {
    SCORE_SUMS sum;
    ring.await(number);
    begin_scores(rows, ring.planes(number), sum);
    while (true) {
        await_operands<0>();
        sum.take();
        ring.end_scores(number);
        TILE_WEIGHTS weights;
        weigh_tile(sum, ring.floats(number), rows, tile * KV_TILE, whole.is_edge(tile * KV_TILE),
                   t, weights);
        ring.await_values(number);
        add_values(ring.records(number) + first_value, ring.planes(number), rows, weights);
        ring.end_use(number++);
        if (++tile == end) return;
        ring.await(number);
        begin_scores(rows, ring.planes(number), sum);
    }
}

// All tiles of the block's work for the 64 rows of a group.
DEVICE void attend_rows(const BLOCK_WORK &work, const HEAD_ROWS &operands, const TILE_RING &ring,
                        unsigned &number, unsigned char *memory) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, t = lane % 4;
    const unsigned row = warp * 16 + lane / 4;
    WHOLE_RANGE whole;
    whole.find(work, operands.window);
    ROW_PAIR rows;
    ROW_TOTALS totals = {(float *)(memory + AT_TOTALS) + threadIdx.x, {0, 0}};
#if HEAD_DIM >= 256
    const unsigned group = warp / GROUP_WARPS;
    rows.low = memory + AT_LOW_QUERIES + group * LOW_QUERIES;
    // Others of the group may still multiply.
    group_barrier(1 + group);
#endif
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool exists = row + 8 * r < work.rows();
        open_row(exists ? operands.q_of(work, row + 8 * r) : 0, operands.scale, r, t, rows);
        rows.position[r] = 0, rows.first[r] = 1;
        rows.span[r] = rows.total[r] = no_softmax();
        if (!exists) continue;
        rows.position[r] = work.position(work.begin + (row + 8 * r) / work.sharing);
        rows.first[r] = first_visible(rows.position[r], operands.window);
    }
#if HEAD_DIM >= 256
    show_to_products();
    group_barrier(1 + group);
#endif
#pragma unroll
    for (int i = 0; i < VALUES; i++) rows.sum[i] = 0.0f;
    bool folded = false;
    const unsigned end = work.last / KV_TILE + 1;
    for (unsigned tile = work.first / KV_TILE; tile < end;) {
        const unsigned stop = min(end, (tile / SPAN_TILES + 1) * SPAN_TILES);
        attend_tiles(ring, whole, rows, HEAD_PARTS > 1 ? work.part * VALUE_PAGE : 0, tile, stop,
                     number, t);
        tile = stop;
        if (tile == end) break;
        if (HEAD_PARTS > 1) totals.find(work, operands, row, t);
        end_span(rows, totals, !folded);
        folded = true;
#pragma unroll
        for (int i = 0; i < VALUES; i++) rows.sum[i] = 0.0f;
    }
    totals.find(work, operands, row, t);
    end_span(rows, totals, !folded);
    store_rows(rows, totals);
}

// Calls use() for every unit of the block whose tokens are alone, or are not; units that see the
// most positions come first.
template <bool ALONE, class USE>
DEVICE void for_units(const LAUNCH &launch, const HEAD_ROWS &operands, const unsigned *starts,
                      unsigned runs, BLOCK_WORK &work, const USE &use) {
    const unsigned tokens = count_of(launch, packet_of(launch, 0));
    const unsigned each = work.kv_heads * HEAD_PARTS;
    for (unsigned unit = blockIdx.x; unit < runs * each; unit += gridDim.x) {
        work.kv_head = unit % each / HEAD_PARTS, work.part = unit % HEAD_PARTS;
        open_run(work, starts, runs - 1 - unit / each, tokens, operands.window);
        work.pages = pages_of(launch, work);
        if (ALONE == (work.count == 1) && !(ALONE && work.part)) use();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_groups(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    // All blocks run at once, so none waits for a launch that may begin here.
    FOLLOWING_MAY_START;
    const PACKET *packet = packet_of(launch, 0);
    unsigned *starts = (unsigned *)(shared + AT_STARTS);
    BLOCK_WORK work;
    HEAD_ROWS operands;
    TILE_RING ring;
    ring.lay_out(shared, AT_BARRIERS);
    if (threadIdx.x == 0) ring.open(WARPS);
    const unsigned runs = open_work(launch, packet, ROWS, starts, THREADS, work, operands);
    unsigned number = 0;
    if (threadIdx.x / WARP_LANES >= WARPS) {
        give_registers<SUPPLY_REGISTERS>();
        for_units<false>(launch, operands, starts, runs, work, [&]() {
            supply_tiles(work, ring, number, threadIdx.x / WARP_LANES - WARPS,
                         threadIdx.x % WARP_LANES);
        });
        return;
    }
    take_registers<USER_REGISTERS>();
    for_units<false>(launch, operands, starts, runs, work,
                     [&]() { attend_rows(work, operands, ring, number, shared); });
    part_barrier<WARPS * WARP_LANES>();
    for_units<true>(launch, operands, starts, runs, work, [&]() {
        for_heads_of_token(work, operands, [&](const SPAN_WORK &token, float *y) {
            PAGE_LIST pages;
            pages.read(token, own_positions(), 0, threadIdx.x % WARP_LANES);
            begin_page(token, pages, 0, 0, shared, threadIdx.x % WARP_LANES);
            attend_token(token, pages, operands.scale, shared, y, SENT());
        });
    });
}
