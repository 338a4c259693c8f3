/* The recurrence of docs/chunk_algorithm.md on the CPU, in float32: sequence by sequence and head by head, chunk after chunk, each
 * chunk's tiles in cache; the scans of ../../scan and ../../selective_scan, by sequence and block of channels; and ../../slstm, ../../wkv, ../../preconditioner. The functions at the end are called from outside.
 */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define CHUNK 64
#define RUN 32 /* products that are added before their sum is added to what is there */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t order __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31

/* One call: its sizes, its operands, its results. Tensors are contiguous, `[tokens, heads, channels]`; absent ones are null. What a
 * row or a column key is, of each rule: `problem_of` in problem.h.
 */
typedef struct {
    int64_t sequences, value_heads, K, V, threads, scratch_numbers;
    int64_t q_heads, k_heads, a_heads, b_heads;
    int64_t decay, read_before; /* decay: 0 none, 1 per token, 2 per channel */
    const int64_t *starts, *chunk_starts; /* [sequences + 1]: of tokens, of chunks */
    const float *q, *k, *v, *beta, *a, *b, *g, *initial_state;
    float *o, *state, *states, *nu; /* states [chunks, value_heads, K, V] and nu [tokens, value_heads, V] are what the backward needs */
    const float *d_o, *d_state;
    float *dq, *dk, *dv, *dbeta, *da, *db, *dg, *d_initial_state; /* each a value head's own */
    float *scratch; /* threads x scratch_numbers */
    double scale;
} Call;

enum { NO_DECAY, TOKEN_DECAY, CHANNEL_DECAY };

#include "problem.h"
#include "../../scan/native/call.h"
#include "../../selective_scan/native/call.h"
#include "../../slstm/native/call.h"
#include "../../wkv/native/call.h"
#include "../../preconditioner/native/call.h"

#if defined(__x86_64__)
#define NAME(x) x##_avx512
#define ROWS 8
#define COLUMNS 2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma,prefer-vector-width=512")
#endif
#include "tiles.h"
#include "pairs.h"
#include "gradients.h"
#include "correlated.h"
#include "chunk.h"
#include "../../scan/native/scan.h"
#include "../../scan/native/complex.h"
#include "../../selective_scan/native/selective.h"
#include "../../slstm/native/slstm.h"
#include "../../wkv/native/wkv.h"
#include "../../preconditioner/native/preconditioner.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef NAME
#undef ROWS
#undef COLUMNS

#define NAME(x) x##_avx2
#define ROWS 6
#define COLUMNS 1
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "tiles.h"
#include "pairs.h"
#include "gradients.h"
#include "correlated.h"
#include "chunk.h"
#include "../../scan/native/scan.h"
#include "../../scan/native/complex.h"
#include "../../selective_scan/native/selective.h"
#include "../../slstm/native/slstm.h"
#include "../../wkv/native/wkv.h"
#include "../../preconditioner/native/preconditioner.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef NAME
#undef ROWS
#undef COLUMNS
#endif

#define NAME(x) x##_plain
#define ROWS 4
#define COLUMNS 1
#include "tiles.h"
#include "pairs.h"
#include "gradients.h"
#include "correlated.h"
#include "chunk.h"
#include "../../scan/native/scan.h"
#include "../../scan/native/complex.h"
#include "../../selective_scan/native/selective.h"
#include "../../slstm/native/slstm.h"
#include "../../wkv/native/wkv.h"
#include "../../preconditioner/native/preconditioner.h"
#undef NAME

typedef void (*Pass)(const void *call, int64_t sequence, int64_t part, float *scratch);

enum { PLAIN, AVX2, AVX512 };
static int most = AVX512;

/* The instructions that are used: the best that the machine has, up to `limit` from now on. */
int flashmix_instructions(int limit) {
    most = limit;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most >= AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return AVX512;
    if (most >= AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PLAIN;
}

#if defined(__x86_64__)
#define PASS_OF(x) ((const Pass[]){x##_plain, x##_avx2, x##_avx512}[flashmix_instructions(most)])
#else
#define PASS_OF(x) x##_plain
#endif

/* Threads take the next sequence and part of it, a head or a block of channels, from a counter; each item is one thread's, so results do
 * not depend on how many there are.
 */
typedef struct {
    const void *call;
    Pass pass;
    long items, parts, threads, scratch_numbers;
    float *scratch;
    atomic_long next;
    atomic_int thread;
} Work;

static void *work(void *given) {
    Work *w = given;
    float *scratch = w->scratch + atomic_fetch_add(&w->thread, 1) * w->scratch_numbers;
    for (long i; (i = atomic_fetch_add(&w->next, 1)) < w->items;) w->pass(w->call, i / w->parts, i % w->parts, scratch);
    return 0;
}

static void run(Work *w) {
    long others = (w->threads < w->items ? w->threads : w->items) - 1, started = 0;
    pthread_t threads[256];
    if (others > 256) others = 256;
    while (started < others && !pthread_create(&threads[started], 0, work, w)) started++;
    work(w);
    while (started) pthread_join(threads[--started], 0);
}

static void run_recurrence(const Call *call, Pass pass) {
    Work w = {.call = call, .pass = pass, .items = call->sequences * call->value_heads, .parts = call->value_heads,
              .threads = call->threads, .scratch = call->scratch, .scratch_numbers = call->scratch_numbers};
    run(&w);
}

static void run_scan(const Scan *call, Pass pass) {
    long blocks = (call->channels + call->block - 1) / call->block;
    Work w = {.call = call, .pass = pass, .items = call->sequences * blocks, .parts = blocks, .threads = call->threads};
    run(&w);
}

static void run_selective(const Selective *call, Pass pass) {
    long width = call->channels / call->groups, blocks = call->groups * ((width + call->block - 1) / call->block);
    Work w = {.call = call, .pass = pass, .items = call->sequences * blocks, .parts = blocks, .threads = call->threads,
              .scratch = call->scratch, .scratch_numbers = call->scratch_numbers};
    run(&w);
}

static void run_slstm(const Slstm *call, Pass pass) {
    Work w = {.call = call, .pass = pass, .items = call->sequences * call->heads, .parts = call->heads, .threads = call->threads};
    run(&w);
}

static void run_wkv(const Wkv *call, Pass pass) {
    long blocks = (call->channels + call->block - 1) / call->block;
    Work w = {.call = call, .pass = pass, .items = call->sequences * blocks, .parts = blocks, .threads = call->threads};
    run(&w);
}

static void run_preconditioner(const Preconditioner *call, Pass pass) {
    long blocks = (call->heads + call->block - 1) / call->block;
    Work w = {.call = call, .pass = pass, .items = call->sequences * blocks, .parts = blocks, .threads = call->threads};
    run(&w);
}

void flashmix_forward(const Call *call) { run_recurrence(call, PASS_OF(forward)); }
void flashmix_backward(const Call *call) { run_recurrence(call, PASS_OF(backward)); }
int flashmix_scan_bytes(void) { return sizeof(Scan); } /* another layout: a library of another version */
void flashmix_scan(const Scan *call) { run_scan(call, PASS_OF(scan)); }
void flashmix_scan_backward(const Scan *call) { run_scan(call, PASS_OF(scan_backward)); }
void flashmix_selective(const Selective *call) { run_selective(call, PASS_OF(selective)); }
void flashmix_selective_backward(const Selective *call) { run_selective(call, PASS_OF(selective_backward)); }
void flashmix_scan_complex(const Scan *call) { run_scan(call, PASS_OF(scan_complex)); }
void flashmix_scan_complex_backward(const Scan *call) { run_scan(call, PASS_OF(scan_complex_backward)); }
void flashmix_slstm(const Slstm *call) { run_slstm(call, PASS_OF(slstm)); }
void flashmix_slstm_backward(const Slstm *call) { run_slstm(call, PASS_OF(slstm_backward)); }
void flashmix_wkv(const Wkv *call) { run_wkv(call, PASS_OF(wkv)); }
void flashmix_wkv_backward(const Wkv *call) { run_wkv(call, PASS_OF(wkv_backward)); }
void flashmix_preconditioner(const Preconditioner *call) { run_preconditioner(call, PASS_OF(preconditioner)); }
void flashmix_preconditioner_backward(const Preconditioner *call) { run_preconditioner(call, PASS_OF(preconditioner_backward)); }

/* Numbers of scratch memory that a thread needs. */
int64_t flashmix_scratch(int64_t K, int64_t V) {
    int64_t Kp = (K + LANES - 1) / LANES * LANES, Vp = (V + LANES - 1) / LANES * LANES;
    return SCRATCH(CHUNK, Kp, Vp);
}
