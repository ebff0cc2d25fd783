/* One-producer one-consumer message ring over shared memory. Plain C without Python, so that it can be built under
 * ThreadSanitizer together with a C driver. The layout is described in ipc/layout.py and docs/ipc.md.
 *
 * Memory order: every store of `tail` is followed by a load of `consumer_waiting`, and every store of
 * `consumer_waiting` by a load of `tail` (the same pair exists for `head` and `producer_waiting`). Both sides must agree
 * on one order of these four accesses, or each can miss the other and the consumer sleeps on a ring that holds data.
 * Release and acquire do not give that, not even on x86-64; sequential consistency does. */
#ifndef TROUTERD_RING_CORE_H
#define TROUTERD_RING_CORE_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the ring layout is little-endian"
#endif

/* A test build replaces these: RING_SC by a weaker order to prove that the litmus test sees the difference,
 * RING_POINT by a hook that kills the process at the named step. */
#ifndef RING_SC
#define RING_SC __ATOMIC_SEQ_CST
#endif
#ifndef RING_POINT
#define RING_POINT(step) ((void)0)
#endif

enum {
    RING_HEADER_BYTES = 4096,
    RING_RECORD_HEADER = 16,
    RING_OFF_CAPACITY = 16,
    RING_OFF_MAX_RECORD = 24,
    RING_OFF_FEATURES = 28,
    RING_OFF_TAIL = 128,
    RING_OFF_SENT_COUNT = 136,
    RING_OFF_PRODUCER_EPOCH = 144,
    RING_OFF_PRODUCER_FENCE = 156,
    RING_OFF_HEAD = 256,
    RING_OFF_RECV_COUNT = 264,
    RING_OFF_CONSUMER_FENCE = 284,
    RING_OFF_CONSUMER_WAITING = 384,
    RING_OFF_PRODUCER_WAITING = 512,
    RING_OFF_FULL_EVENTS = 640,
    RING_OFF_WAKES_SENT = 648,
    RING_OFF_BAD_RECORDS = 784,
    RING_OFF_BATCHES = 792,
    RING_OFF_SPACE_WAKES_SENT = 808,
    RING_OFF_STATE = 896,
};

enum { RING_FEATURE_CHECKSUM = 1, RING_FEATURE_FRAGMENTS = 2 };
enum { RING_FLAG_MORE = 0x100, RING_EPOCH_MASK = 0xff };
enum { RING_STATE_CLOSED = 3, RING_STATE_POISONED = 4 };
enum { RING_FULL = 0, RING_PUBLISHED = 1, RING_PUBLISHED_WOKE = 2 };
enum { RING_TOO_LARGE = -1, RING_CLOSED = -2, RING_POISONED = -3 };

/* Why a ring was given up; the same numbers as layout.Fault. */
enum {
    RING_FAULT_CURSOR = 1,
    RING_FAULT_LENGTH = 2,
    RING_FAULT_SEQ = 3,
    RING_FAULT_CHECK = 4,
    RING_FAULT_PADDING = 5,
    RING_FAULT_FRAGMENT = 6,
    RING_FAULT_MEMORY = 7,
    RING_FAULT_STATE = 8,
};

static const uint32_t RING_PADDING = 0x80000000u;

typedef struct {
    uint32_t length;
    uint32_t seq;
    uint32_t check;
    uint16_t kind;
    uint16_t flags;
} ring_header;

typedef struct {
    uint8_t *base;
    uint64_t capacity;
    uint64_t max_message;
    uint32_t max_record;
    int checksum;
} ring_memory;

typedef struct {
    ring_memory mem;
    uint64_t tail;      /* published */
    uint64_t next;      /* written, not yet published */
    uint64_t head;      /* last value seen of the consumer's cursor */
    uint64_t sent;
    uint32_t seq;
    uint8_t epoch;
    int data_event;
} ring_producer;

typedef struct {
    ring_memory mem;
    uint64_t head;      /* released */
    uint64_t next;      /* read, not yet released */
    uint64_t tail;      /* last value seen of the producer's cursor */
    uint64_t received;
    uint32_t seq;
    int epoch;          /* -1 until the first record after an attach */
    int fault;
    int space_event;
    uint8_t *scratch;   /* a fragmented message, put together; allocated when the first one comes */
} ring_consumer;

typedef struct {
    const uint8_t *payload;
    size_t length;
    uint16_t kind;
} ring_message;

/* ---- shared words ---- */

static inline uint64_t *ring_word(const ring_memory *mem, size_t offset) {
    return (uint64_t *)(void *)(mem->base + offset);
}

static inline uint32_t *ring_half(const ring_memory *mem, size_t offset) {
    return (uint32_t *)(void *)(mem->base + offset);
}

static inline void ring_count(const ring_memory *mem, size_t offset) {
    uint64_t *counter = ring_word(mem, offset);
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

static inline uint32_t ring_state(const ring_memory *mem) {
    return __atomic_load_n(ring_half(mem, RING_OFF_STATE), __ATOMIC_RELAXED);
}

static inline void ring_poison(const ring_memory *mem) {
    __atomic_store_n(ring_half(mem, RING_OFF_STATE), RING_STATE_POISONED, __ATOMIC_RELAXED);
}

static inline uint64_t ring_align(uint64_t bytes) { return (bytes + 15) & ~(uint64_t)15; }

static inline void ring_signal(int event) {
    const uint64_t one = 1;
    /* EAGAIN means that the counter is at its maximum, so the reader is already due to wake. */
    while (event >= 0 && write(event, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

static inline int ring_membarrier_global_expedited(void) {
    return (int)syscall(SYS_membarrier, 1 << 1, 0, 0);
}

/* Announces a sleep. A peer without fences of its own (the pure-Python ring) sets `peer_fence`, and this side then
 * pays for both. 0, or -1 with errno. */
static inline int ring_announce(const ring_memory *mem, size_t flag, size_t peer_fence) {
    __atomic_store_n(ring_word(mem, flag), 1, RING_SC);
    if (__atomic_load_n(ring_half(mem, peer_fence), __ATOMIC_RELAXED)) return ring_membarrier_global_expedited();
    return 0;
}

/* Takes the announcement back before the event is written: in the other order a new announcement could be wiped out. */
static inline int ring_wake(const ring_memory *mem, size_t flag, int event) {
    if (!__atomic_load_n(ring_word(mem, flag), RING_SC)) return 0;
    if (!__atomic_exchange_n(ring_word(mem, flag), 0, RING_SC)) return 0;
    RING_POINT(wake);
    ring_signal(event);
    return 1;
}

/* ---- CRC-32 (the polynomial of zlib), eight bytes at a time ---- */

static uint32_t ring_crc_table[8][256];

static inline void ring_crc_init(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
        ring_crc_table[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            ring_crc_table[t][i] = (ring_crc_table[t - 1][i] >> 8) ^ ring_crc_table[0][ring_crc_table[t - 1][i] & 255];
}

static inline uint32_t ring_crc(uint32_t crc, const uint8_t *data, size_t length) {
    const uint32_t(*table)[256] = ring_crc_table;
    crc = ~crc;
    for (; length >= 8; data += 8, length -= 8) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    while (length--) crc = (crc >> 8) ^ table[0][(crc ^ *data++) & 255];
    return ~crc;
}

/* Covers every header field but the check itself, so that a flipped kind or flag is seen too. */
static inline uint32_t ring_check(const ring_header *header, const uint8_t *payload, size_t length) {
    uint32_t fields[3] = {header->length, header->seq, header->kind | (uint32_t)header->flags << 16};
    return ring_crc(ring_crc(0, (const uint8_t *)fields, sizeof fields), payload, length);
}

/* ---- attach ---- */

static inline int ring_cursors_ok(const ring_memory *mem, uint64_t tail, uint64_t head) {
    return tail - head <= mem->capacity && ((tail | head) & 15) == 0;
}

/* `base` is a segment whose header has been validated. */
static inline void ring_open(ring_memory *mem, uint8_t *base) {
    mem->base = base;
    mem->capacity = *ring_word(mem, RING_OFF_CAPACITY);
    mem->max_record = *ring_half(mem, RING_OFF_MAX_RECORD);
    mem->checksum = (*ring_half(mem, RING_OFF_FEATURES) & RING_FEATURE_CHECKSUM) != 0;
    mem->max_message = mem->capacity - RING_RECORD_HEADER * (mem->capacity / mem->max_record + 2);
}

static inline int ring_producer_attach(ring_producer *p, uint8_t *base, int data_event) {
    memset(p, 0, sizeof *p);
    ring_open(&p->mem, base);
    p->tail = p->next = __atomic_load_n(ring_word(&p->mem, RING_OFF_TAIL), __ATOMIC_RELAXED);
    p->head = __atomic_load_n(ring_word(&p->mem, RING_OFF_HEAD), __ATOMIC_ACQUIRE);
    p->sent = __atomic_load_n(ring_word(&p->mem, RING_OFF_SENT_COUNT), __ATOMIC_RELAXED);
    p->epoch = *ring_word(&p->mem, RING_OFF_PRODUCER_EPOCH) & RING_EPOCH_MASK;
    p->data_event = data_event;
    return ring_cursors_ok(&p->mem, p->tail, p->head) ? 0 : -RING_FAULT_CURSOR;
}

static inline int ring_consumer_attach(ring_consumer *c, uint8_t *base, int space_event) {
    memset(c, 0, sizeof *c);
    ring_open(&c->mem, base);
    c->head = c->next = __atomic_load_n(ring_word(&c->mem, RING_OFF_HEAD), __ATOMIC_RELAXED);
    c->tail = __atomic_load_n(ring_word(&c->mem, RING_OFF_TAIL), __ATOMIC_ACQUIRE);
    c->received = __atomic_load_n(ring_word(&c->mem, RING_OFF_RECV_COUNT), __ATOMIC_RELAXED);
    c->epoch = -1;
    c->space_event = space_event;
    return ring_cursors_ok(&c->mem, c->tail, c->head) ? 0 : -RING_FAULT_CURSOR;
}

/* ---- producer ---- */

/* Free bytes, after a fresh look at head; -1 and poisoned if the consumer's cursor is impossible. */
static inline int64_t ring_free(ring_producer *p, int order) {
    uint64_t head = __atomic_load_n(ring_word(&p->mem, RING_OFF_HEAD), order);
    if (!ring_cursors_ok(&p->mem, p->tail, head) || head < p->head) {
        ring_poison(&p->mem);
        return -1;
    }
    p->head = head;
    return (int64_t)(p->mem.capacity - (p->next - head));
}

static inline void ring_put(ring_producer *p, const uint8_t *payload, uint32_t length, uint16_t kind, uint16_t flags) {
    uint8_t *at = p->mem.base + RING_HEADER_BYTES + (p->next & (p->mem.capacity - 1));
    ring_header header = {length, p->seq, 0, kind, (uint16_t)(flags | p->epoch)};
    size_t body = length & RING_PADDING ? 0 : length;
    if (p->mem.checksum) header.check = ring_check(&header, payload, body);
    RING_POINT(header);
    memcpy(at, &header, sizeof header);
    RING_POINT(payload);
    if (body) memcpy(at + sizeof header, payload, body);
    p->next += RING_RECORD_HEADER + ring_align(length & ~RING_PADDING);
}

/* Payload bytes of the next fragment: fragments end where the buffer ends, so they never need padding. */
static inline uint32_t ring_fragment(const ring_memory *mem, uint64_t position, size_t left) {
    uint64_t contiguous = mem->capacity - (position & (mem->capacity - 1)) - RING_RECORD_HEADER;
    uint64_t size = contiguous < mem->max_record ? contiguous : mem->max_record;
    return (uint32_t)(left < size ? left : size);
}

/* Bytes that a message takes at the present position, with its padding or its fragment headers. */
static inline uint64_t ring_need(const ring_producer *p, size_t length) {
    const ring_memory *mem = &p->mem;
    if (length <= mem->max_record) {
        uint64_t contiguous = mem->capacity - (p->next & (mem->capacity - 1));
        uint64_t need = RING_RECORD_HEADER + ring_align(length);
        return need <= contiguous ? need : need + contiguous;
    }
    uint64_t position = p->next;
    while (length) {
        uint32_t size = ring_fragment(mem, position, length);
        position += RING_RECORD_HEADER + ring_align(size);
        length -= size;
    }
    return position - p->next;
}

static inline void ring_put_fragments(ring_producer *p, const uint8_t *payload, size_t length, uint16_t kind) {
    while (length) {
        uint32_t size = ring_fragment(&p->mem, p->next, length);
        ring_put(p, payload, size, kind, size < length ? RING_FLAG_MORE : 0);
        p->seq++;
        payload += size;
        length -= size;
    }
}

/* Writes a whole message behind the unpublished ones: RING_PUBLISHED, RING_FULL (nothing written) or a negative code.
 * All fragments of a message are published by one store of tail, so that a message is accepted whole or not at all. */
static inline int ring_append(ring_producer *p, const uint8_t *payload, size_t length, uint16_t kind) {
    uint32_t state = ring_state(&p->mem);
    if (state >= RING_STATE_CLOSED) return state == RING_STATE_CLOSED ? RING_CLOSED : RING_POISONED;
    if (length > p->mem.max_message) return RING_TOO_LARGE;
    uint64_t need = ring_need(p, length);
    if (p->mem.capacity - (p->next - p->head) < need) {
        int64_t room = ring_free(p, __ATOMIC_ACQUIRE);
        if (room < 0) return RING_POISONED;
        if ((uint64_t)room < need) {
            ring_count(&p->mem, RING_OFF_FULL_EVENTS);
            return RING_FULL;
        }
    }
    if (length > p->mem.max_record) {
        ring_put_fragments(p, payload, length, kind);
    } else {
        uint64_t contiguous = p->mem.capacity - (p->next & (p->mem.capacity - 1));
        if (need > contiguous) ring_put(p, NULL, RING_PADDING | (uint32_t)(contiguous - RING_RECORD_HEADER), 0, 0);
        ring_put(p, payload, (uint32_t)length, kind, 0);
        p->seq++;
    }
    p->sent++;
    return RING_PUBLISHED;
}

static inline int ring_publish(ring_producer *p) {
    RING_POINT(before_tail);
    p->tail = p->next;
    __atomic_store_n(ring_word(&p->mem, RING_OFF_TAIL), p->tail, RING_SC);
    RING_POINT(after_tail);
    __atomic_store_n(ring_word(&p->mem, RING_OFF_SENT_COUNT), p->sent, __ATOMIC_RELAXED);
    if (!ring_wake(&p->mem, RING_OFF_CONSUMER_WAITING, p->data_event)) return RING_PUBLISHED;
    RING_POINT(after_wake);
    ring_count(&p->mem, RING_OFF_WAKES_SENT);
    return RING_PUBLISHED_WOKE;
}

static inline int ring_push(ring_producer *p, const uint8_t *payload, size_t length, uint16_t kind) {
    int result = ring_append(p, payload, length, kind);
    return result == RING_PUBLISHED ? ring_publish(p) : result;
}

static inline void ring_producer_cancel(ring_producer *p) {
    __atomic_store_n(ring_word(&p->mem, RING_OFF_PRODUCER_WAITING), 0, __ATOMIC_RELAXED);
}

/* 1: announced, and a message of `length` bytes still does not fit, so it is safe to sleep on the space event.
 * 0: do not sleep, there is room (or the ring is poisoned, which the next push reports). -1: errno. */
static inline int ring_producer_prepare(ring_producer *p, size_t length) {
    if (ring_announce(&p->mem, RING_OFF_PRODUCER_WAITING, RING_OFF_CONSUMER_FENCE) < 0) return -1;
    int64_t room = ring_free(p, RING_SC);
    if (room >= 0 && (uint64_t)room < ring_need(p, length)) return 1;
    ring_producer_cancel(p);
    return 0;
}

/* ---- consumer ---- */

static inline int ring_fault(ring_consumer *c, int fault) {
    c->fault = fault;
    ring_count(&c->mem, RING_OFF_BAD_RECORDS);
    ring_poison(&c->mem);
    return -fault;
}

/* Looks at tail again; 1 if there is something to read, 0 if not, or a negative fault. */
static inline int ring_look(ring_consumer *c, int order) {
    if (c->fault) return -c->fault;
    if (ring_state(&c->mem) == RING_STATE_POISONED) return -(c->fault = RING_FAULT_STATE);
    uint64_t tail = __atomic_load_n(ring_word(&c->mem, RING_OFF_TAIL), order);
    if (!ring_cursors_ok(&c->mem, tail, c->head) || tail - c->head < c->tail - c->head)
        return ring_fault(c, RING_FAULT_CURSOR);
    c->tail = tail;
    return c->next != tail;
}

static inline int ring_seq_ok(const ring_consumer *c, const ring_header *header) {
    int epoch = header->flags & RING_EPOCH_MASK;
    if (c->epoch < 0) return 1;
    return header->seq == (epoch == c->epoch ? c->seq : 0);
}

/* Reads one record at c->next, skipping padding. The header is copied out once and only the copy is used, so that a
 * peer that writes where it must not can give wrong bytes, never a read outside the ring. */
static inline int ring_record(ring_consumer *c, ring_header *header, const uint8_t **payload) {
    const ring_memory *mem = &c->mem;
    for (;;) {
        uint64_t available = c->tail - c->next;
        if (available == 0) return 0;
        uint64_t contiguous = mem->capacity - (c->next & (mem->capacity - 1));
        const uint8_t *at = mem->base + RING_HEADER_BYTES + (c->next & (mem->capacity - 1));
        memcpy(header, at, sizeof *header);
        int padding = (header->length & RING_PADDING) != 0;
        uint32_t length = header->length & ~RING_PADDING;
        if (padding && (length != contiguous - RING_RECORD_HEADER || contiguous > available))
            return ring_fault(c, RING_FAULT_PADDING);
        uint64_t total = RING_RECORD_HEADER + ring_align(length);
        if (!padding && (length > mem->max_record || total > contiguous || total > available))
            return ring_fault(c, RING_FAULT_LENGTH);
        if (!ring_seq_ok(c, header)) return ring_fault(c, RING_FAULT_SEQ);
        *payload = at + RING_RECORD_HEADER;
        if (mem->checksum && header->check != ring_check(header, *payload, padding ? 0 : length))
            return ring_fault(c, RING_FAULT_CHECK);
        c->next += total;
        if (padding) continue;
        c->epoch = header->flags & RING_EPOCH_MASK;
        c->seq = header->seq + 1;
        return 1;
    }
}

static inline int ring_gather(ring_consumer *c, ring_message *message, ring_header header, const uint8_t *payload) {
    /* The fragments lie between head and tail, so the buffer's capacity is always enough. */
    if (!c->scratch && !(c->scratch = malloc(c->mem.capacity))) return ring_fault(c, RING_FAULT_MEMORY);
    size_t size = 0;
    for (;;) {
        if (header.length) memcpy(c->scratch + size, payload, header.length);
        size += header.length;
        if (!(header.flags & RING_FLAG_MORE)) break;
        int result = ring_record(c, &header, &payload);
        if (result < 0) return result;
        if (result == 0 || header.kind != message->kind) return ring_fault(c, RING_FAULT_FRAGMENT);
    }
    message->payload = c->scratch;
    message->length = size;
    return 1;
}

/* The next message: 1, 0 if the ring is empty, or a negative fault. The payload stays valid until ring_release. */
static inline int ring_next(ring_consumer *c, ring_message *message) {
    if (c->fault) return -c->fault;
    if (c->next == c->tail) {
        int more = ring_look(c, __ATOMIC_ACQUIRE);
        if (more <= 0) return more;
    }
    ring_header header;
    const uint8_t *payload;
    int result = ring_record(c, &header, &payload);
    if (result <= 0) return result;
    message->kind = header.kind;
    message->payload = payload;
    message->length = header.length;
    if (header.flags & RING_FLAG_MORE) {
        result = ring_gather(c, message, header, payload);
        if (result <= 0) return result;
    }
    c->received++;
    return 1;
}

/* Gives everything read so far back to the producer and tells it, if it waits for room and a quarter is free. */
static inline void ring_release(ring_consumer *c) {
    const ring_memory *mem = &c->mem;
    if (c->next == c->head) return;
    c->head = c->next;
    RING_POINT(before_head);
    __atomic_store_n(ring_word(mem, RING_OFF_HEAD), c->head, RING_SC);
    RING_POINT(after_head);
    __atomic_store_n(ring_word(mem, RING_OFF_RECV_COUNT), c->received, __ATOMIC_RELAXED);
    ring_count(mem, RING_OFF_BATCHES);
    if (!__atomic_load_n(ring_word(mem, RING_OFF_PRODUCER_WAITING), RING_SC)) return;
    uint64_t tail = __atomic_load_n(ring_word(mem, RING_OFF_TAIL), __ATOMIC_ACQUIRE);
    if (mem->capacity - (tail - c->head) < mem->capacity / 4) return;
    if (ring_wake(mem, RING_OFF_PRODUCER_WAITING, c->space_event)) ring_count(mem, RING_OFF_SPACE_WAKES_SENT);
}

static inline void ring_consumer_cancel(ring_consumer *c) {
    __atomic_store_n(ring_word(&c->mem, RING_OFF_CONSUMER_WAITING), 0, __ATOMIC_RELAXED);
}

/* 1: announced and the ring is empty, so it is safe to sleep on the data event. 0: do not sleep, there is data (or a
 * fault, which the next read reports). -1: errno. */
static inline int ring_consumer_prepare(ring_consumer *c) {
    if (ring_announce(&c->mem, RING_OFF_CONSUMER_WAITING, RING_OFF_PRODUCER_FENCE) < 0) return -1;
    if (ring_look(c, RING_SC) == 0) return 1;
    ring_consumer_cancel(c);
    return 0;
}

static inline uint64_t ring_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Looks for data for up to `microseconds` without announcing a sleep: 1 if there is something (or a fault). */
static inline int ring_spin(ring_consumer *c, unsigned microseconds) {
    uint64_t end = ring_nanoseconds() + microseconds * (uint64_t)1000;
    do {
        for (int i = 0; i < 32; i++) {
            if (ring_look(c, __ATOMIC_ACQUIRE)) return 1;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("isb");
#endif
        }
    } while (ring_nanoseconds() < end);
    return 0;
}

#endif
