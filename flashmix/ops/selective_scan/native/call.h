/* One selective scan: its sizes, its operands, its results. Tensors are contiguous: u, dt, y [tokens, channels]; A [channels, states];
 * B, C [tokens, groups, states]; states of sequences [channels, states]. `kept` [chunks, channels, states] holds the state at the start of each
 * chunk. Absent tensors are null.
 */
typedef struct {
    int64_t sequences, channels, states, groups, block, threads, scratch_numbers; /* block: channels that a thread takes at a time */
    const int64_t *starts, *chunk_starts; /* [sequences + 1]: of tokens, of chunks */
    const float *u, *dt, *A, *B, *C, *initial_state;
    float *y, *state, *kept; /* the backward reads kept */
    const float *d_y, *d_state;
    float *du, *ddt, *dA, *dB, *dC, *d_initial_state; /* dA [sequences, channels, states]; dB, dC [parts, tokens, groups, states] */
    float *scratch; /* threads x scratch_numbers */
} Selective;
