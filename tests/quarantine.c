// Finds writes to freed memory. Preloaded by tests/heap_check.py with --quarantine.
//
// Each small block that is freed is filled with a pattern and kept in a ring instead of being returned to malloc. A thread
// compares the blocks of the ring with the pattern again and again. A difference is a write after the free: the process prints
// the block, what it held before, and the functions on the stack of the free, and aborts.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BLOCKS = 1 << 15, LARGEST = 200, BEFORE = 8, STACK = 48 };
#define PATTERN 0xA5

typedef struct {
    unsigned char *block;
    size_t size;
    int64_t time;
    uint64_t before[BEFORE];
    uintptr_t stack[STACK];
} Freed;

extern void __libc_free(void *block);

static Freed freed[BLOCKS];
static unsigned next;
static atomic_flag locked = ATOMIC_FLAG_INIT;
static atomic_int watcher;  // the process that has the thread

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static void lock(void) {
    while (atomic_flag_test_and_set_explicit(&locked, memory_order_acquire)) sched_yield();
}

static void unlock(void) { atomic_flag_clear_explicit(&locked, memory_order_release); }

static void name(uintptr_t address, const char *indent) {
    Dl_info found;
    if (!dladdr((void *)address, &found) || !found.dli_fname) return;
    uintptr_t start = (uintptr_t)(found.dli_saddr ? found.dli_saddr : found.dli_fbase);
    fprintf(stderr, "%s%#lx %s+%#lx (%s+%#lx)\n", indent, address, found.dli_sname ? found.dli_sname : "?",
            address - start, found.dli_fname, address - (uintptr_t)found.dli_fbase);
}

static void report(const Freed *entry) {
    fprintf(stderr, "quarantine: process %d: a block of %zu bytes at %p was written %.3f ms or less after its free\n",
            (int)getpid(), entry->size, (void *)entry->block, (now() - entry->time) / 1e6);
    for (size_t at = 0; at < entry->size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, entry->block + at, entry->size - at < 8 ? entry->size - at : 8);
        fprintf(stderr, "  +%3zu  now %016lx", at, word);
        if (at / 8 < BEFORE) fprintf(stderr, "  before the free %016lx", entry->before[at / 8]);
        fprintf(stderr, "\n");
        if (at / 8 < BEFORE) name(entry->before[at / 8], "        before: ");
        name(word, "        now: ");
    }
    fprintf(stderr, "  words of the stack of the free that are addresses of code or data:\n");
    for (int i = 0; i < STACK; i++) name(entry->stack[i], "    ");
    fflush(stderr);
    abort();
}

static int is_written(const Freed *entry) {
    for (size_t at = 0; at < entry->size; at++)
        if (entry->block[at] != PATTERN) return 1;
    return 0;
}

static void *watch(void *unused) {
    (void)unused;
    struct timespec pause = {0, 250000000};  // a pass reads the blocks from memory, not from the cache: some milliseconds
    for (;;) {
        nanosleep(&pause, NULL);
        for (int start = 0; start < BLOCKS; start += 1024) {
            lock();
            for (int i = start; i < start + 1024; i++)
                if (freed[i].block && is_written(&freed[i])) report(&freed[i]);
            unlock();
        }
    }
    return NULL;
}

static void after_fork(void) { atomic_flag_clear(&locked); }

void quarantine_watch(void) {  // called by Python in a process that is to be watched
    if (atomic_exchange(&watcher, (int)getpid()) == (int)getpid()) return;
    pthread_t thread;
    pthread_create(&thread, NULL, watch, NULL);
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(lock, unlock, after_fork); }

void free(void *block) {
    if (!block) return;
    size_t size = malloc_usable_size(block);
    if (size > LARGEST) {
        __libc_free(block);
        return;
    }
    uintptr_t *frame = __builtin_frame_address(0);
    Freed entry = {.block = block, .size = size, .time = now()};
    memcpy(entry.before, block, size < sizeof entry.before ? size : sizeof entry.before);
    memcpy(entry.stack, frame, sizeof entry.stack);
    memset(block, PATTERN, size);
    lock();
    Freed old = freed[next];
    freed[next] = entry;
    next = (next + 1) % BLOCKS;
    if (old.block && is_written(&old)) report(&old);
    unlock();
    if (old.block) __libc_free(old.block);
}
