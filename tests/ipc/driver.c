/* Drives both ends of the C core as two threads of one process, without Python, so that sanitizers see every access.
 *
 *   driver stream MESSAGES CHECKSUM START   random sizes, both ends sleep; START is the first cursor and number
 *   driver hammer SLEEPS                    single messages at random distances: as many sleeps as possible
 *   driver litmus ROUNDS                    publish against prepare_wait: rounds in which each missed the other; 20 s at most
 *   driver damage ROUNDS                    random bits flipped in a filled ring; lost counts the rounds that noticed
 *
 * Prints one line of key=value and exits with 1 when a message was lost, torn or out of order. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <time.h>

#include "_ring_core.h"

enum { CAPACITY = 1 << 16, MAX_RECORD = 1 << 12, MAX_SIZE = 20000, KIND = 7, LITMUS_SECONDS = 20 };

static _Alignas(4096) uint8_t memory[RING_HEADER_BYTES + CAPACITY];
static ring_producer producer;
static ring_consumer consumer;
static int data_event, space_event;
static uint64_t total;
static atomic_uint_fast64_t sleeps, lost, late;
static atomic_int stop;

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void fail(const char *what, uint64_t number) {
    printf("error=%s message=%llu\n", what, (unsigned long long)number);
    fflush(stdout);
    _exit(1);
}

static void set_up(int checksum, uint64_t start) {
    memset(memory, 0, sizeof memory);
    ring_memory mem = {.base = memory};
    *ring_word(&mem, RING_OFF_CAPACITY) = CAPACITY;
    *ring_half(&mem, RING_OFF_MAX_RECORD) = MAX_RECORD;
    *ring_half(&mem, RING_OFF_FEATURES) = RING_FEATURE_FRAGMENTS | (checksum ? RING_FEATURE_CHECKSUM : 0);
    *ring_half(&mem, RING_OFF_STATE) = 1;
    *ring_word(&mem, RING_OFF_TAIL) = *ring_word(&mem, RING_OFF_HEAD) = start & ~(uint64_t)15;
    ring_crc_init();
    data_event = eventfd(0, EFD_NONBLOCK);
    space_event = eventfd(0, EFD_NONBLOCK);
    if (ring_producer_attach(&producer, memory, data_event) || ring_consumer_attach(&consumer, memory, space_event))
        fail("attach", 0);
    producer.seq = (uint32_t)start;
}

/* Sleeps on the event. A wake that is late on a busy host is no lost wake, so a timeout waits once more. */
static void sleep_on(int event, int (*ready)(void)) {
    struct pollfd wait = {.fd = event, .events = POLLIN};
    atomic_fetch_add(&sleeps, 1);
    for (int attempt = 0; poll(&wait, 1, 1000) == 0; attempt++) {
        if (atomic_load(&stop)) return;
        if (!ready()) continue;
        if (attempt == 0) {
            atomic_fetch_add(&late, 1);
            continue;
        }
        atomic_fetch_add(&lost, 1);
        return;
    }
    uint64_t count;
    if (read(event, &count, sizeof count) < 0 && errno != EAGAIN) fail("eventfd", 0);
}

static int has_data(void) { return ring_look(&consumer, __ATOMIC_ACQUIRE) != 0; }

static size_t wanted_room;
static int has_room(void) {
    int64_t room = ring_free(&producer, __ATOMIC_ACQUIRE);
    return room >= (int64_t)ring_need(&producer, wanted_room);
}

static size_t message_size(uint64_t *state) {
    uint64_t random = next_random(state);
    return random % 64 == 0 ? random / 64 % MAX_SIZE : random / 64 % 200;
}

static void *stream_producer(void *unused) {
    uint64_t sizes = 88172645463325252u;
    static uint8_t payload[MAX_SIZE];
    for (uint64_t number = 0; number < total; number++) {
        size_t size = message_size(&sizes);
        memset(payload, (int)(number & 255), size);
        if (size >= 8) memcpy(payload, &number, 8);
        int result;
        while ((result = ring_push(&producer, payload, size, KIND)) == RING_FULL) {
            wanted_room = size;
            if (ring_producer_prepare(&producer, size) == 1) sleep_on(space_event, has_room);
        }
        if (result < 0) fail("push", number);
    }
    return unused;
}

static void check_message(const ring_message *message, uint64_t number, size_t size) {
    uint64_t found = number;
    if (message->length != size || message->kind != KIND) fail("header", number);
    if (size >= 8) memcpy(&found, message->payload, 8);
    if (found != number) fail("number", number);
    for (size_t i = 8; i < size; i++)
        if (message->payload[i] != (number & 255)) fail("torn", number);
}

static void *stream_consumer(void *unused) {
    uint64_t sizes = 88172645463325252u;
    ring_message message = {0};
    for (uint64_t number = 0; number < total;) {
        int batch = 0, result = 0;
        while (batch < 64 && number < total && (result = ring_next(&consumer, &message)) == 1) {
            check_message(&message, number++, message_size(&sizes));
            batch++;
        }
        if (result < 0) fail("fault", number);
        ring_release(&consumer);
        if (batch == 0 && ring_consumer_prepare(&consumer) == 1) sleep_on(data_event, has_data);
    }
    return unused;
}

static void *hammer_producer(void *unused) {
    uint64_t random = 2463534242u;
    while (!atomic_load(&stop)) {
        if (ring_push(&producer, (const uint8_t *)"12345678", 8, KIND) == RING_FULL) sched_yield();
        for (uint64_t pause = next_random(&random) % 400; pause; pause--) __asm__ volatile("" ::: "memory");
    }
    return unused;
}

static void *hammer_consumer(void *unused) {
    ring_message message = {0};
    while (atomic_load(&sleeps) < total) {
        while (ring_next(&consumer, &message) == 1) ring_release(&consumer);
        if (ring_consumer_prepare(&consumer) == 1) sleep_on(data_event, has_data);
    }
    atomic_store(&stop, 1);
    return unused;
}

/* Two threads on one core never overlap. */
static void pin(int side) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || side-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
        return;
    }
}

/* Two threads meet before and after every round. */
static atomic_uint_fast64_t arrived;
static int slept, woke;

static void meet(uint64_t round) {
    atomic_fetch_add(&arrived, 1);
    for (unsigned spins = 0; atomic_load(&arrived) < 2 * round; spins++)
        if (spins > 4000) sched_yield();
}

/* Where both sides share a core, or the cores are busy, every meeting may take a time slice: fewer rounds must do then. */
static int over(time_t begin, uint64_t round) {
    struct timespec now;
    if (round % 64) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec - begin > LITMUS_SECONDS;
}

static void *litmus_producer(void *unused) {
    uint64_t random = 2463534242u;
    struct timespec begin;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    pin(0);
    for (uint64_t round = 1; round <= total; round++) {
        meet(2 * round - 1);
        for (uint64_t pause = next_random(&random) % 24; pause; pause--) __asm__ volatile("" ::: "memory");
        producer.next += RING_RECORD_HEADER;
        woke = ring_publish(&producer) == RING_PUBLISHED_WOKE;
        if (over(begin.tv_sec, round)) atomic_store(&stop, 1);
        meet(2 * round);
        if (atomic_load(&stop)) break;
    }
    return unused;
}

static void *litmus_consumer(void *unused) {
    uint64_t random = 88172645463325252u;
    pin(1);
    for (uint64_t round = 1; round <= total; round++) {
        consumer.head = consumer.next = consumer.tail;
        ring_consumer_cancel(&consumer);
        __atomic_store_n(ring_word(&consumer.mem, RING_OFF_HEAD), consumer.head, __ATOMIC_SEQ_CST);
        meet(2 * round - 1);
        for (uint64_t pause = next_random(&random) % 24; pause; pause--) __asm__ volatile("" ::: "memory");
        slept = ring_consumer_prepare(&consumer) == 1;
        meet(2 * round);
        if (slept && !woke) atomic_fetch_add(&lost, 1);
        if (ring_look(&consumer, __ATOMIC_ACQUIRE) != 1) fail("tail", round);
        if (atomic_load(&stop)) break;
    }
    return unused;
}

/* The ring lies in heap memory of exactly its size, so that the address sanitizer sees any read beyond it. */
static void damage(void) {
    uint64_t random = 88172645463325252u, sum = 0;
    static uint8_t payload[MAX_SIZE];
    for (uint64_t round = 0; round < total; round++) {
        uint8_t *copy = malloc(sizeof memory);
        if (!copy) fail("memory", round);
        set_up((int)(round & 1), next_random(&random));
        while (ring_push(&producer, payload, message_size(&random), KIND) > 0) {
        }
        for (int flips = 0; flips < 3; flips++) {
            uint64_t at = RING_HEADER_BYTES + next_random(&random) % CAPACITY;
            if (flips == 0) at = RING_HEADER_BYTES + ((consumer.head + 16 * (round % 32)) & (CAPACITY - 1)) + round % 16;
            memory[at] ^= (uint8_t)(1 << next_random(&random) % 8);
        }
        memcpy(copy, memory, sizeof memory);
        if (ring_consumer_attach(&consumer, copy, -1)) fail("attach", round);
        ring_message message = {0};
        int result;
        while ((result = ring_next(&consumer, &message)) == 1) {
            for (size_t i = 0; i < message.length; i++) sum += message.payload[i];
            if (message.length > consumer.mem.max_message) fail("length", round);
        }
        ring_release(&consumer);
        atomic_fetch_add(&lost, result < 0);
        free(consumer.scratch);
        consumer.scratch = NULL;
        free(copy);
        close(data_event);
        close(space_event);
    }
    if (sum == 0) fail("sum", sum);
}

static void run(void *(*first)(void *), void *(*second)(void *)) {
    pthread_t threads[2];
    if (pthread_create(&threads[0], NULL, first, NULL) || pthread_create(&threads[1], NULL, second, NULL))
        fail("thread", 0);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
}

int main(int count, char **args) {
    if (count < 3) return 2;
    total = strtoull(args[2], NULL, 10);
    set_up(count > 3 && atoi(args[3]), count > 4 ? strtoull(args[4], NULL, 10) : 0);
    if (!strcmp(args[1], "stream")) run(stream_producer, stream_consumer);
    else if (!strcmp(args[1], "hammer")) run(hammer_producer, hammer_consumer);
    else if (!strcmp(args[1], "litmus")) run(litmus_producer, litmus_consumer);
    else if (!strcmp(args[1], "damage")) damage();
    else return 2;
    free(consumer.scratch);
    printf("count=%llu sleeps=%llu lost=%llu late=%llu\n", (unsigned long long)total,
           (unsigned long long)atomic_load(&sleeps), (unsigned long long)atomic_load(&lost),
           (unsigned long long)atomic_load(&late));
    return 0;
}
