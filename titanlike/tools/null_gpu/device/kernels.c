// Kernels: registration, binaries and launches. A launch is counted and computes nothing.
#include "device.h"
#include <elf.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel *_Atomic all_kernels;

static bool contains(const char *name, const char *const *parts) {
    for (; *parts; parts++) if (strstr(name, *parts)) return true;
    return false;
}

// The kind of a kernel that is not generated, from its mangled name.
static enum kind kind_of(const char *name) {
    static const char *const attention[] = {"flash_fwd", "flash_bwd", "fmha", "flex_attention", NULL};
    static const char *const matmul[] = {"cutlass", "gemm", "gemv", "_tem_fused_mm", "_tem_fused_bmm", "_tem_fused__grouped_mm", NULL};
    return contains(name, attention) ? ATTENTION : contains(name, matmul) ? MATMUL : OTHER;
}

struct kernel *new_kernel(const char *name, enum kind kind) {
    struct kernel *kernel = calloc(1, sizeof *kernel);
    kernel->name = strdup(name);
    kernel->kind = kind;
    pthread_mutex_lock(&lock);
    kernel->next = all_kernels;
    all_kernels = kernel;
    pthread_mutex_unlock(&lock);
    return kernel;
}

atomic_long num_launches;

void launched(struct kernel *kernel) {
    static atomic_flag told = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set_explicit(&told, memory_order_relaxed)) first_launch();
    atomic_fetch_add_explicit(&kernel->launches, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&num_launches, 1, memory_order_relaxed);
}

// Kernels that PyTorch's libraries contain: the host's function is the key. Filled while the libraries are loaded.
static struct { const void *function; struct kernel *kernel; } *table;
static size_t table_size, table_used;

static size_t slot_of(const void *function) {
    size_t slot = ((uintptr_t)function * 0x9E3779B97F4A7C15u) >> 20 & (table_size - 1);
    while (table[slot].function && table[slot].function != function) slot = (slot + 1) & (table_size - 1);
    return slot;
}

static void grow(void) {
    typeof(table) old = table;
    size_t old_size = table_size;
    table_size = old_size ? 2 * old_size : 1 << 16;
    table = calloc(table_size, sizeof *table);
    for (size_t i = 0; i < old_size; i++) if (old[i].function) table[slot_of(old[i].function)] = old[i];
    free(old);
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFunction(
    void **binary, const char *function, char *device_function, const char *name, int threads, uint3 *thread, uint3 *block, dim3 *block_dim,
    dim3 *grid_dim, int *warp_size
) {
    pthread_mutex_lock(&lock);
    if (2 * table_used >= table_size) grow();
    size_t slot = slot_of(function);
    table_used += table[slot].function == NULL;
    table[slot].function = function;
    pthread_mutex_unlock(&lock);
    table[slot].kernel = new_kernel(name, kind_of(name));
}
char __cudaInitModule(void **binary) { return 1; }

static struct kernel *registered(const void *function) {
    if (table_size == 0) fail("a kernel was launched before any was registered");
    size_t slot = slot_of(function);
    if (table[slot].function == NULL) return (struct kernel *)function;  // a handle that cudaLibraryGetKernel returned
    return table[slot].kernel;
}

// A launch by <<<...>>> passes its configuration through two calls. Kernels do not run, so that it is not needed.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0;
    *(void **)stream = NULL;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)registered(function); return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    launched((struct kernel *)kernel);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    launched(registered(function));
    return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    launched(registered(function));
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
    launched(registered(function));
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    attributes->binaryVersion = attributes->ptxVersion = 10 * description()->major + description()->minor;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) { *blocks = 2; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *configuration) { *clusters = 2; return CUDA_SUCCESS; }

// Binaries of Triton: ELF files. What a kernel needs is in a section of attributes: a format, a name, a size, then a symbol and a value.
enum { ATTRIBUTE_WITH_SIZE = 4, FRAME_SIZE = 0x11, REGISTERS = 0x2f };
struct module { const char *image; };

static int attribute_of(const char *image, int wanted, const char *name) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    for (int s = 0; s < header->e_shnum; s++) {
        if (strcmp(names + sections[s].sh_name, ".nv.info")) continue;
        const Elf64_Shdr *symbols = &sections[sections[s].sh_link];
        const Elf64_Sym *symbol = (const Elf64_Sym *)(image + symbols->sh_offset);
        const char *strings = image + sections[symbols->sh_link].sh_offset;
        const char *entry = image + sections[s].sh_offset, *end = entry + sections[s].sh_size;
        while (entry + 4 <= end) {
            unsigned char format = entry[0], attribute = entry[1];
            uint16_t size = *(const uint16_t *)(entry + 2);
            entry += 4;
            if (format != ATTRIBUTE_WITH_SIZE) continue;  // its value is in the two bytes of the size
            const uint32_t *values = (const uint32_t *)entry;
            if (attribute == wanted && size == 8 && !strcmp(strings + symbol[values[0]].st_name, name)) return values[1];
            entry += size;
        }
    }
    return 0;
}

static int shared_bytes(const char *image, const char *name) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    char wanted[512];
    snprintf(wanted, sizeof wanted, ".nv.shared.%s", name);
    for (int s = 0; s < header->e_shnum; s++) if (!strcmp(names + sections[s].sh_name, wanted)) return sections[s].sh_size;
    return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (memcmp(image, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
    const Elf64_Ehdr *header = image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)((const char *)image + header->e_shoff);
    size_t size = header->e_shoff + header->e_shnum * sizeof(Elf64_Shdr);
    for (int s = 0; s < header->e_shnum; s++) {
        size_t end = sections[s].sh_offset + (sections[s].sh_type == SHT_NOBITS ? 0 : sections[s].sh_size);
        if (end > size) size = end;
    }
    struct module *loaded = malloc(sizeof *loaded);
    loaded->image = memcpy(malloc(size), image, size);
    *module = (CUmodule)loaded;
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    size_t size = ftell(file);
    char *image = malloc(size);
    rewind(file);
    size_t read = fread(image, 1, size, file);
    fclose(file);
    CUresult result = read == size ? cuModuleLoadData(module, image) : CUDA_ERROR_INVALID_IMAGE;
    free(image);
    return result;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    const char *image = ((struct module *)module)->image;
    enum kind kind = kind_of(name);
    struct kernel *kernel = new_kernel(name, kind == OTHER ? GENERATED : kind);
    kernel->loaded = true;
    kernel->registers = attribute_of(image, REGISTERS, name);
    kernel->spill_bytes = attribute_of(image, FRAME_SIZE, name);
    kernel->shared_bytes = shared_bytes(image, name);
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function) {
    const struct kernel *kernel = (const struct kernel *)function;
    *value = name == CU_FUNC_ATTRIBUTE_NUM_REGS ? kernel->registers
        : name == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? kernel->spill_bytes
        : name == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? kernel->shared_bytes
        : name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) {
    struct kernel *kernel = (struct kernel *)function;
    if (name != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    return kernel->shared_bytes + value <= description()->shared_per_block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache configuration) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
    CUstream stream, void **arguments, void **extra
) {
    launched((struct kernel *)function);
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction function, void **arguments, void **extra) {
    launched((struct kernel *)function);
    return CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
    CUstream stream, void **arguments
) {
    launched((struct kernel *)function);
    return CUDA_SUCCESS;
}

void print_kernels(FILE *file) {
    static const char *const kinds[] = {"matmul", "attention", "generated", "other"};
    const char *separator = "[";
    for (struct kernel *kernel = all_kernels; kernel; kernel = kernel->next) {
        if (kernel->launches == 0 && !kernel->loaded) continue;
        fprintf(file, "%s[\"%s\", \"%s\", %ld", separator, kernel->name, kinds[kernel->kind], kernel->launches);
        if (kernel->loaded) fprintf(file, ", %d, %d, %d", kernel->registers, kernel->spill_bytes, kernel->shared_bytes);
        fprintf(file, "]");
        separator = ", ";
    }
    fprintf(file, *separator == '[' ? "[]" : "]");
}
