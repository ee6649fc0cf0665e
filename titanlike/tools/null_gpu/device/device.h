// The null device: a library that stands for CUDA, cuBLAS, cuDNN and NCCL. Memory, handles and counters are real, kernels do nothing.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The device that is emulated, from the environment variable NULL_GPU_DEVICE.
struct description {
    char name[64];
    long major, minor, multiprocessors, memory, shared_per_block, shared_per_multiprocessor, l2_cache, clock_khz, memory_clock_khz, bus_bits;
    long devices, context;
};
const struct description *description(void);

// Kernels, by name. A CUDA function handle is a pointer to its `struct kernel`.
enum kind { MATMUL, ATTENTION, GENERATED, OTHER };
struct kernel {
    const char *name;
    enum kind kind;
    int registers, spill_bytes, shared_bytes;  // of a kernel that was loaded from a binary
    bool loaded;
    atomic_long launches;
    struct kernel *next;
};
struct kernel *new_kernel(const char *name, enum kind kind);
void launched(struct kernel *kernel);
extern atomic_long num_launches;

// Memory
enum place { PAGEABLE, PINNED, DEVICE };
enum place place_of(const void *address, int *device);
void *allocate(size_t size, enum place place);  // NULL if the capacity of the device is exceeded
void release(const void *address);

// What the host wrote to the device shortly before can be read. `read_device` fills the rest with zeros, and returns whether there was any.
enum { MOVED = 64 << 10 };  // bytes of the largest copy or message on devices whose data is moved
void wrote(const void *address, size_t size);
bool read_device(void *target, const void *source, size_t size);

// Synchronizations of the host, with their place in Python, which a callback finds.
void synchronized(const char *call);
void first_launch(void);

// Messages of collectives that are small enough to be moved for real. They are written when the host reads them.
void complete_messages(const void *address, size_t size);
void discard_messages(const void *address, size_t size);

// Lists, each as a JSON array, for the record of a process.
void print_kernels(FILE *file);
void print_copies(FILE *file);
void print_memory(FILE *file);
void print_synchronizations(FILE *file);
void print_communicators(FILE *file);

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
