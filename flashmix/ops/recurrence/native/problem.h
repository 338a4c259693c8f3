/* What a call is for one sequence and head, whatever the instruction set: its keys by rule, and how its tiles are laid out. */

#define BLOCKS (CHUNK / LANES)
/* Numbers of scratch memory: what chunk_of and the backward take of tiles of keys, values, pairs and states. */
#define SCRATCH(C, K, V) ((15 + 2 * BLOCKS) * C * K + 7 * C * V + 11 * C * C + 3 * K * V + 2 * K + C)

typedef struct {
    const float *from; /* of the first token */
    float *to;         /* its gradient, a value head's own, or null */
    long stride, to_stride;
    float sign;
    int exclusive, diagonal; /* of a row key: when it reads */
} Key;

/* What a call is for one sequence and head: its keys, and how their tiles are laid out. */
typedef struct {
    Key row[2], column[2];
    int rows, columns, corrected, raw, decay, K, V, Kp, Vp;
    long tokens, first_chunk, HV, head;
    const float *v, *beta, *g;
    float *dbeta, *dg;
} Problem;

static float *take(float **memory, long numbers) {
    float *found = *memory;
    *memory += numbers;
    return found;
}

static const float *at(const float *tensor, long token, long heads, long head, long width) {
    return tensor ? tensor + (token * heads + head) * width : 0;
}

/* The keys of a rule, [1.5] and the table before it. */
static Problem problem_of(const Call *call, long sequence, long head) {
    long first = call->starts[sequence], HV = call->value_heads, K = call->K;
    Problem p = {.corrected = call->beta || call->a, .raw = !call->beta && call->k, .decay = (int)call->decay};
    p.K = (int)K, p.V = (int)call->V, p.HV = HV, p.head = head;
    p.Kp = (p.K + LANES - 1) / LANES * LANES, p.Vp = (p.V + LANES - 1) / LANES * LANES;
    p.tokens = call->starts[sequence + 1] - first, p.first_chunk = call->chunk_starts[sequence];
    p.rows = p.corrected ? 2 : 1, p.columns = p.corrected && p.raw ? 2 : 1;
#define KEY(name, heads) \
    .from = at(call->name, first, heads, head / (HV / heads), K), .stride = heads * K, \
    .to = (float *)at(call->d##name, first, HV, head, K), .to_stride = HV * K
    Key q = {KEY(q, call->q_heads), .sign = 1, .exclusive = (int)call->read_before, .diagonal = !call->read_before};
    Key k = {KEY(k, call->k_heads), .sign = 1}, a = {KEY(a, call->a_heads), .sign = 1, .exclusive = 1};
    Key b = {KEY(b, call->b_heads), .sign = 1}, back = k;
#undef KEY
    back.sign = -1;
    p.row[0] = q, p.row[1] = call->beta ? back : a;
    p.column[0] = call->k ? k : b, p.column[1] = b;
    p.v = at(call->v, first, HV, head, p.V);
    p.beta = at(call->beta, first, HV, head, 1), p.dbeta = (float *)at(call->dbeta, first, HV, head, 1);
    long width = p.decay == CHANNEL_DECAY ? K : 1;
    p.g = at(call->g, first, HV, head, width), p.dg = (float *)at(call->dg, first, HV, head, width);
    return p;
}
