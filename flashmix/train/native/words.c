/* Words of GPT-2's pattern, cut and looked up: text to token numbers where all words are known; the caller encodes those that are not.
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * Text is UTF-8 without spaces outside ASCII. What stands between spaces and is not all ASCII is one word, with one space before it:
 * the pattern cuts nowhere across its ends. A table keeps each word's bytes and its token numbers.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OTHER, LETTER, DIGIT, SPACE, FAR };

typedef struct {
    uint64_t hash;
    int64_t start, ids; /* in bytes and in numbers */
    uint32_t length, count; /* bytes, tokens */
} Word;

typedef struct {
    Word *words;
    uint8_t *bytes;
    uint32_t *numbers;
    uint32_t *slots; /* number of a word + 1, 0 if free */
    int64_t count, room, bytes_used, bytes_room, numbers_used, numbers_room, slots_mask;
    uint8_t kind[256];
} Table;

/* At least `needed` elements, twice as many as before. Returns 0: there is no memory. */
static int grown(void **memory, int64_t *room, int64_t needed, size_t size) {
    if (needed <= *room) return 1;
    int64_t more = *room * 2 > needed ? *room * 2 : needed;
    void *found = realloc(*memory, (size_t)more * size);
    if (!found) return 0;
    *memory = found, *room = more;
    return 1;
}

void flashmix_words_free(Table *table) {
    if (!table) return;
    free(table->words), free(table->bytes), free(table->numbers), free(table->slots), free(table);
}

void flashmix_words_clear(Table *table) {
    memset(table->slots, 0, (size_t)(table->slots_mask + 1) * sizeof(uint32_t));
    table->count = table->bytes_used = table->numbers_used = 0;
}

/* An empty table; null: there is no memory. */
Table *flashmix_words_new(void) {
    Table *table = calloc(1, sizeof(Table));
    if (!table) return 0;
    table->slots_mask = (1 << 16) - 1;
    table->slots = calloc((size_t)table->slots_mask + 1, sizeof(uint32_t));
    for (int c = 0; c < 256; c++) {
        int letter = (c | 32) >= 'a' && (c | 32) <= 'z', digit = c >= '0' && c <= '9';
        int space = c == ' ' || (c >= '\t' && c <= '\r');
        table->kind[c] = c >= 128 ? FAR : letter ? LETTER : digit ? DIGIT : space ? SPACE : OTHER;
    }
    if (table->slots) return table;
    flashmix_words_free(table);
    return 0;
}

/* Words, and bytes of them and of their numbers, that the table holds. */
int64_t flashmix_words_count(const Table *table) { return table->count; }
int64_t flashmix_words_memory(const Table *table) {
    return table->bytes_used + 4 * table->numbers_used + (int64_t)sizeof(Word) * table->count;
}

static uint64_t mixed(uint64_t x) {
    x *= 0x9E3779B97F4A7C15u;
    return x ^ (x >> 29);
}

static uint64_t hash_of(const uint8_t *text, int64_t length) {
    uint64_t hash = (uint64_t)length, part;
    for (; length >= 8; text += 8, length -= 8) {
        memcpy(&part, text, 8);
        hash = mixed(hash ^ part);
    }
    part = 0;
    memcpy(&part, text, (size_t)length);
    return mixed(mixed(hash ^ part));
}

static int more_slots(Table *table) {
    int64_t mask = table->slots_mask * 2 + 1;
    uint32_t *slots = calloc((size_t)mask + 1, sizeof(uint32_t));
    if (!slots) return 0;
    for (int64_t index = 0; index < table->count; index++) {
        uint64_t place = table->words[index].hash & (uint64_t)mask;
        while (slots[place]) place = (place + 1) & (uint64_t)mask;
        slots[place] = (uint32_t)(index + 1);
    }
    free(table->slots);
    table->slots = slots, table->slots_mask = mask;
    return 1;
}

/* The number of a word; a new one is added, without tokens. -1: there is no memory. */
static int64_t number_of(Table *table, const uint8_t *text, int64_t length) {
    uint64_t hash = hash_of(text, length), place = hash & (uint64_t)table->slots_mask;
    for (; table->slots[place]; place = (place + 1) & (uint64_t)table->slots_mask) {
        const Word *word = table->words + table->slots[place] - 1;
        if (word->hash == hash && word->length == (uint32_t)length &&
            !memcmp(table->bytes + word->start, text, (size_t)length))
            return table->slots[place] - 1;
    }
    int64_t number = table->count;
    if (!grown((void **)&table->words, &table->room, number + 1, sizeof(Word))) return -1;
    if (!grown((void **)&table->bytes, &table->bytes_room, table->bytes_used + length, 1)) return -1;
    memcpy(table->bytes + table->bytes_used, text, (size_t)length);
    table->words[number] = (Word){hash, table->bytes_used, 0, (uint32_t)length, 0};
    table->bytes_used += length, table->count++;
    table->slots[place] = (uint32_t)(number + 1);
    return 2 * table->count <= table->slots_mask || more_slots(table) ? number : -1;
}

static const uint8_t *past(const uint8_t *kinds, int kind, const uint8_t *at, const uint8_t *end) {
    while (at < end && kinds[*at] == kind) at++;
    return at;
}

/* The end of a contraction at an apostrophe; the apostrophe itself where there is none. */
static const uint8_t *contraction(const uint8_t *at, const uint8_t *end) {
    if (end - at > 1 && memchr("stmd", at[1], 4)) return at + 2;
    int two = end - at > 2 && (!memcmp(at + 1, "re", 2) || !memcmp(at + 1, "ve", 2) || !memcmp(at + 1, "ll", 2));
    return two ? at + 3 : at;
}

/* The end of the word that begins at `at`; `*run` is the end of the run between spaces that was seen to be ASCII. */
static const uint8_t *word_end(const uint8_t *kinds, const uint8_t *at, const uint8_t *end, const uint8_t **run) {
    const uint8_t *first = at + (*at == ' ');
    if (first == end || kinds[*first] == SPACE) {
        const uint8_t *last = past(kinds, SPACE, at, end);
        return last == end || last - at == 1 ? last : last - 1;
    }
    if (first >= *run) {
        int far = 0;
        for (*run = first; *run < end && kinds[**run] != SPACE; ++*run) far |= kinds[**run] == FAR;
        if (far) return *run;
    }
    if (*at == '\'') {
        const uint8_t *last = contraction(at, end);
        if (last > at) return last;
    }
    return past(kinds, kinds[*first], first, end);
}

/* Cuts text from `start` on into at most `most` words, whose numbers go to `found`; numbers of words that are new in the table are all
 * those from the table's count before. `*stop` is where it ended. Returns how many words; -1: there is no memory.
 */
int64_t flashmix_words_cut(Table *table, const uint8_t *text, int64_t start, int64_t size, int64_t most, uint32_t *found, int64_t *stop) {
    const uint8_t *at = text + start, *end = text + size, *run = at;
    int64_t count = 0;
    while (at < end && count < most) {
        const uint8_t *last = word_end(table->kind, at, end, &run);
        int64_t number = number_of(table, at, last - at);
        if (number < 0) return -1;
        found[count++] = (uint32_t)number;
        at = last;
    }
    *stop = at - text;
    return count;
}

/* The bytes of word `number`, and how many. */
const uint8_t *flashmix_words_bytes(const Table *table, int64_t number, int64_t *length) {
    *length = table->words[number].length;
    return table->bytes + table->words[number].start;
}

/* Gives the words from `first` on their tokens: `ends` [words] are their ends in `ids`. Returns 0: there is no memory. */
int flashmix_words_learn(Table *table, int64_t first, int64_t words, const int64_t *ends, const uint32_t *ids) {
    int64_t total = words ? ends[words - 1] : 0, base = table->numbers_used;
    if (!grown((void **)&table->numbers, &table->numbers_room, base + total, sizeof(uint32_t))) return 0;
    memcpy(table->numbers + base, ids, (size_t)total * sizeof(uint32_t));
    table->numbers_used += total;
    for (int64_t index = 0, begin = 0; index < words; begin = ends[index++]) {
        table->words[first + index].ids = base + begin;
        table->words[first + index].count = (uint32_t)(ends[index] - begin);
    }
    return 1;
}

/* Writes the tokens of words, from `made` on, as numbers of 2 or 4 bytes; returns how many there are then. -1: there is room for `room`. */
int64_t flashmix_words_write(
    const Table *table, const uint32_t *found, int64_t count, int64_t width, int64_t made, int64_t room, void *out) {
    for (int64_t index = 0; index < count; index++) {
        const Word *word = table->words + found[index];
        const uint32_t *ids = table->numbers + word->ids;
        if (made + word->count > room) return -1;
        if (width == 2)
            for (uint32_t i = 0; i < word->count; i++) ((uint16_t *)out)[made++] = (uint16_t)ids[i];
        else
            for (uint32_t i = 0; i < word->count; i++) ((uint32_t *)out)[made++] = ids[i];
    }
    return made;
}
