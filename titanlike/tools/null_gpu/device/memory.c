// Memory of the device and pinned memory of the host: address ranges without pages, counted against the capacity of the device.
#include "device.h"
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20, COPIED_TO_DEVICE = 1 << 20 };

struct range {
    uintptr_t start;
    size_t size;
    enum place place;
    int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;  // in order of their addresses
static size_t num_ranges, capacity_of_ranges;
static long used, peak;

static size_t rounded(size_t size) { return (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY; }

// Returns the index of the first range that starts after this address.
static size_t after(uintptr_t address) {
    size_t low = 0, high = num_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct range *find(const void *address) {
    size_t index = after((uintptr_t)address);
    if (index == 0) return NULL;
    struct range *range = &ranges[index - 1];
    return (uintptr_t)address < range->start + range->size ? range : NULL;
}

static void insert(struct range range) {
    if (num_ranges == capacity_of_ranges) {
        capacity_of_ranges = capacity_of_ranges ? 2 * capacity_of_ranges : 256;
        ranges = realloc(ranges, capacity_of_ranges * sizeof(struct range));
    }
    size_t index = after(range.start);
    memmove(&ranges[index + 1], &ranges[index], (num_ranges - index) * sizeof(struct range));
    ranges[index] = range;
    num_ranges++;
}

static struct range removed(const void *address) {
    struct range *range = find(address), copy = {0};
    if (range == NULL) return copy;
    copy = *range;
    memmove(range, range + 1, (num_ranges - (range - ranges) - 1) * sizeof(struct range));
    num_ranges--;
    return copy;
}

static bool take(size_t size) {
    if (used + (long)size > description()->memory - description()->context) return false;
    used += size;
    if (used > peak) peak = used;
    return true;
}

static void *map(size_t size, size_t alignment) {
    char *start = mmap(NULL, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) fail("mmap of %zu bytes failed: raise vm.max_map_count or the limit of virtual memory (ulimit -v)", size);
    madvise(start, size + alignment, MADV_NOHUGEPAGE);  // a byte that is written takes 4 KiB, not 2 MiB
    char *aligned = (char *)(((uintptr_t)start + alignment - 1) / alignment * alignment);
    if (aligned > start) munmap(start, aligned - start);
    munmap(aligned + size, start + alignment - aligned);
    return aligned;
}

static int current_device(void) {
    int device;
    cudaGetDevice(&device);
    return device;
}

void *allocate(size_t size, enum place place) {
    size = rounded(size ? size : 1);
    pthread_mutex_lock(&lock);
    void *address = NULL;
    if (place == PINNED || take(size)) {
        address = map(size, GRANULARITY);
        insert((struct range){(uintptr_t)address, size, place, current_device()});
    }
    pthread_mutex_unlock(&lock);
    return address;
}

void release(const void *address) {
    if (address == NULL) return;
    pthread_mutex_lock(&lock);
    struct range range = removed(address);
    if (range.size == 0) fail("%p was freed, but is no allocation of the device", address);
    if (range.place == DEVICE) used -= range.size;
    pthread_mutex_unlock(&lock);
    discard_messages(address, range.size);
    munmap((void *)range.start, range.size);
}

enum place place_of(const void *address, int *device) {
    pthread_mutex_lock(&lock);
    struct range *range = find(address);
    enum place place = range ? range->place : PAGEABLE;
    if (device) *device = range ? range->device : 0;
    pthread_mutex_unlock(&lock);
    return place;
}

cudaError_t cudaMalloc(void **address, size_t size) {
    *address = allocate(size, DEVICE);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) { return cudaMalloc(address, size); }
cudaError_t cudaFree(void *address) { release(address); return cudaSuccess; }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) { *address = allocate(size, PINNED); return cudaSuccess; }
cudaError_t cudaFreeHost(void *address) { release(address); return cudaSuccess; }

cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    pthread_mutex_lock(&lock);
    insert((struct range){(uintptr_t)address, size, PINNED, 0});
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
    pthread_mutex_lock(&lock);
    removed(address);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = description()->memory;
    *free_bytes = description()->memory - description()->context - used;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    enum place place = place_of(address, &attributes->device);
    attributes->type = place == DEVICE ? cudaMemoryTypeDevice : place == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    if (place == DEVICE) attributes->devicePointer = (void *)address;
    if (place != DEVICE) attributes->hostPointer = (void *)address;
    return cudaSuccess;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    int device;
    enum place place = place_of((void *)address, &device);
    if (place == PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)data = address;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned *)data = place == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)data = device;
    else return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

// Expandable segments: an address range, to which memory is mapped piece by piece. A handle is the size of its memory.
static const CUmemGenericAllocationHandle IMPORTED = 1;  // in the handle of memory that another process created

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    *address = (CUdeviceptr)map(size, alignment ? alignment : GRANULARITY);
    insert((struct range){*address, size, DEVICE, current_device()});
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&lock);
    removed((void *)address);
    pthread_mutex_unlock(&lock);
    munmap((void *)address, size);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    bool fits = take(size);
    pthread_mutex_unlock(&lock);
    *handle = size;
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (handle & IMPORTED) return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    used -= handle;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
// Symmetric memory: what a rank maps of another rank's memory is a range of its own. It is counted where it was created.
CUresult cuMemExportToShareableHandle(void *file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)file = memfd_create("null GPU", MFD_CLOEXEC);
    return *(int *)file < 0 || ftruncate(*(int *)file, handle & ~IMPORTED) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *file, CUmemAllocationHandleType type) {
    struct stat information;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat((int)(intptr_t)file, &information)) return CUDA_ERROR_NOT_SUPPORTED;
    *handle = information.st_size | IMPORTED;
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    discard_messages((void *)address, size);
    madvise((void *)address, size, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option) {
    *size = GRANULARITY;
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    struct range *range = find((void *)address);
    if (range && start) *start = range->start;
    if (range && size) *size = range->size;
    pthread_mutex_unlock(&lock);
    return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Copies. What the host writes to the device can be read back until the next launch, and while ranks exchange objects for some more launches.
// Everything else reads as zero: the result of a kernel must not be what an earlier tensor left in its memory.
enum { NUM_WRITES = 256, LAUNCHES_OF_AN_EXCHANGE = 64 };
static atomic_int exchanges;
void null_gpu_exchange(int change) { exchanges += change; }

static struct { const char *start; size_t size; long launches; } writes[NUM_WRITES];
static unsigned num_writes;
static pthread_mutex_t writes_lock = PTHREAD_MUTEX_INITIALIZER;

void wrote(const void *address, size_t size) {
    pthread_mutex_lock(&writes_lock);
    unsigned slot = num_writes++ % NUM_WRITES;
    writes[slot].start = address;
    writes[slot].size = size;
    writes[slot].launches = num_launches;
    pthread_mutex_unlock(&writes_lock);
}

bool read_device(void *target, const void *source, size_t size) {
    bool found = false;
    long oldest = num_launches - (exchanges ? LAUNCHES_OF_AN_EXCHANGE : 0);
    memset(target, 0, size);
    pthread_mutex_lock(&writes_lock);
    for (unsigned i = num_writes > NUM_WRITES ? num_writes - NUM_WRITES : 0; i < num_writes; i++) {
        const char *start = writes[i % NUM_WRITES].start, *end = start + writes[i % NUM_WRITES].size, *from = source;
        if (writes[i % NUM_WRITES].launches < oldest) continue;
        if (start < from) start = from;
        if (end > from + size) end = from + size;
        if (start < end) memcpy((char *)target + (start - from), start, end - start), found = true;
    }
    pthread_mutex_unlock(&writes_lock);
    return found;
}

enum direction { TO_DEVICE, TO_HOST, ON_DEVICE, ON_HOST, SET, DIRECTIONS };
static const char *const directions[] = {"host to device", "device to host", "device to device", "host to host", "memset"};
static atomic_long copies[DIRECTIONS], bytes_copied[DIRECTIONS], pageable_copies[DIRECTIONS];

static void copied(enum direction direction, size_t size, bool pageable) {
    copies[direction]++;
    bytes_copied[direction] += size;
    if (pageable) pageable_copies[direction]++;
}

static void copy(void *target, const void *source, size_t size) {
    enum place from = place_of(source, NULL), to = place_of(target, NULL);
    if (size == 0) return;
    if (to == DEVICE && from == DEVICE) {
        copied(ON_DEVICE, size, false);
        if (size > MOVED) return;
        char data[MOVED];
        complete_messages(source, size);
        discard_messages(target, size);
        if (!read_device(data, source, size)) return;
        memcpy(target, data, size);
        wrote(target, size);
    } else if (to == DEVICE) {
        copied(TO_DEVICE, size, from == PAGEABLE);
        discard_messages(target, size);
        if (size > COPIED_TO_DEVICE) return;
        memcpy(target, source, size);
        wrote(target, size);
    } else if (from == DEVICE) {
        copied(TO_HOST, size, to == PAGEABLE);
        complete_messages(source, size);
        if (to == PAGEABLE || size <= COPIED_TO_DEVICE) read_device(target, source, size);
    } else {
        copied(ON_HOST, size, false);
        memcpy(target, source, size);
    }
}

static void set(void *target, int value, size_t size) {
    copied(SET, size, false);
    discard_messages(target, size);
    if (size > COPIED_TO_DEVICE) return;
    memset(target, value, size);
    wrote(target, size);
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    copy(target, source, size);
    synchronized("cudaMemcpy");
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(target, source, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size, cudaStream_t stream) {
    copy(target, source, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(
    void *target, size_t target_pitch, const void *source, size_t pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream
) {
    for (size_t row = 0; row < height; row++) copy((char *)target + row * target_pitch, (const char *)source + row * pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t size, size_t offset, enum cudaMemcpyKind kind) { return cudaSuccess; }
cudaError_t cudaMemset(void *target, int value, size_t size) { set(target, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) { return cudaMemset(target, value, size); }
CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
    copied(SET, 4 * count, false);
    discard_messages((void *)target, 4 * count);
    if (4 * count > COPIED_TO_DEVICE) return CUDA_SUCCESS;
    for (size_t i = 0; i < count; i++) ((unsigned *)target)[i] = value;
    wrote((void *)target, 4 * count);
    return CUDA_SUCCESS;
}

void print_copies(FILE *file) {
    for (int d = 0; d < DIRECTIONS; d++)
        fprintf(file, "%s[\"%s\", %ld, %ld, %ld]", d ? ", " : "[", directions[d], copies[d], bytes_copied[d], pageable_copies[d]);
    fprintf(file, "]");
}
void print_memory(FILE *file) { fprintf(file, "[%ld, %ld]", used, peak); }
