// Devices, streams, events and CUDA graphs. A stream completes at once. An event is the time at which the host recorded it.
#include "device.h"
#include <dlfcn.h>
#include <stdarg.h>
#include <time.h>

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "null GPU: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    abort();
}

static struct description emulated;

static void read_description(void) {
    const char *text = getenv("NULL_GPU_DEVICE");
    struct description *d = &emulated;
    if (text == NULL || sscanf(text, "%63[^;];%ld;%ld;%ld;%ld;%ld;%ld;%ld;%ld;%ld;%ld;%ld;%ld", d->name, &d->major, &d->minor, &d->multiprocessors,
            &d->memory, &d->shared_per_block, &d->shared_per_multiprocessor, &d->l2_cache, &d->clock_khz, &d->memory_clock_khz, &d->bus_bits,
            &d->context, &d->devices) != 13)
        fail("NULL_GPU_DEVICE does not describe a device; start programs with python -m titanlike.tools.null_gpu");
}

const struct description *description(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_description);
    return &emulated;
}

static _Thread_local int device_of_thread;

cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible == NULL ? description()->devices : *visible != 0;
    for (; visible && *visible; visible++) *count += *visible == ',';
    return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) { *device = device_of_thread; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= description()->devices) return cudaErrorInvalidDevice;
    device_of_thread = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *possible, int device, int peer) { *possible = device != peer; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) { snprintf(id, length, "0000:%02x:00.0", device + 1); return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (cudaMemPool_t)&emulated; return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "error of the null device";
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    const struct description *d = description();
    memset(p, 0, sizeof *p);
    strcpy(p->name, d->name);
    memset(p->uuid.bytes, device + 1, sizeof p->uuid.bytes);
    p->totalGlobalMem = d->memory;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = d->shared_per_block;
    p->sharedMemPerMultiprocessor = d->shared_per_multiprocessor;
    p->reservedSharedMemPerBlock = 1 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 64 << 10;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = i < 2 ? 1024 : 64, p->maxGridSize[i] = i ? 65535 : INT32_MAX;
    p->totalConstMem = 64 << 10;
    p->memPitch = INT32_MAX;
    p->textureAlignment = p->surfaceAlignment = 512;
    p->major = d->major;
    p->minor = d->minor;
    p->multiProcessorCount = d->multiprocessors;
    p->l2CacheSize = d->l2_cache;
    p->memoryBusWidth = d->bus_bits;
    p->pciBusID = device + 1;
    p->asyncEngineCount = 3;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = p->streamPrioritiesSupported = 1;
    p->ECCEnabled = p->managedMemory = p->hostRegisterSupported = p->memoryPoolsSupported = p->computePreemptionSupported = 1;
    return cudaSuccess;
}

static int attribute(int name) {
    const struct description *d = description();
    switch (name) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return INT32_MAX;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return d->shared_per_block;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return d->shared_per_multiprocessor;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1 << 10;
    case cudaDevAttrTotalConstantMemory: return 64 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 64 << 10;
    case cudaDevAttrClockRate: return d->clock_khz;
    case cudaDevAttrMemoryClockRate: return d->memory_clock_khz;
    case cudaDevAttrGlobalMemoryBusWidth: return d->bus_bits;
    case cudaDevAttrL2CacheSize: return d->l2_cache;
    case cudaDevAttrMultiProcessorCount: return d->multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return d->major;
    case cudaDevAttrComputeCapabilityMinor: return d->minor;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrManagedMemory: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;  // a feature that the null device lacks: multicast, fabric handles, ...
    }
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) { *value = attribute(name); return cudaSuccess; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) { *value = attribute(name); return CUDA_SUCCESS; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { snprintf(name, length, "%s", description()->name); return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { memset(uuid, device + 1, sizeof *uuid); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)&emulated; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&emulated; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext *context) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetDevice(CUdevice *device) { return cudaGetDevice(device); }
CUresult cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = cudaGetErrorString((cudaError_t)error); return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

// The compiler of source code, NVRTC, which is not replaced, asks for undocumented functions of the driver, and works without them.
CUresult cuGetExportTable(const void **table, const CUuuid *id) { return CUDA_ERROR_NOT_FOUND; }

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status
) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    void *found = dlsym(RTLD_DEFAULT, versioned);
    if (found == NULL) found = dlsym(RTLD_DEFAULT, symbol);
    *function = found ? found : (void *)not_supported;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// Streams
struct stream { int priority; struct graph *capture; unsigned long long id; };
static struct stream default_stream;
static atomic_ullong captures;

static struct stream *stream_of(cudaStream_t handle) { return (uintptr_t)handle <= 2 ? &default_stream : (struct stream *)handle; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) { if ((uintptr_t)handle > 2) free(handle); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) { *priority = stream_of(handle)->priority; return cudaSuccess; }
CUresult cuStreamWriteValue32_v2(CUstream handle, CUdeviceptr address, unsigned value, unsigned flags) { return CUDA_SUCCESS; }
cudaError_t cudaStreamQuery(cudaStream_t handle) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t handle) { synchronized("cudaStreamSynchronize"); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { synchronized("cudaDeviceSynchronize"); return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) { function(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(handle, cudaSuccess, data);
    return cudaSuccess;
}

// Events
struct event { struct timespec time; };

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) { *handle = calloc(1, sizeof(struct event)); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) { free(handle); return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t handle) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t handle) { synchronized("cudaEventSynchronize"); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)handle)->time);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) { return cudaEventRecord(handle, stream); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    struct timespec a = ((struct event *)from)->time, b = ((struct event *)to)->time;
    *milliseconds = (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6;
    return cudaSuccess;
}

// CUDA graphs: of a capture, the number of launches is kept.
struct graph { long nodes; };

static cudaError_t begin_capture(cudaStream_t handle, struct graph *graph) {
    struct stream *stream = stream_of(handle);
    stream->capture = graph;
    stream->id = ++captures;
    graph->nodes -= num_launches;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    return begin_capture(handle, calloc(1, sizeof(struct graph)));
}
cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t handle, cudaGraph_t graph, const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *data, size_t count,
    enum cudaStreamCaptureMode mode
) {
    return begin_capture(handle, (struct graph *)graph);
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    stream_of(handle)->capture->nodes += num_launches;
    *graph = (cudaGraph_t)stream_of(handle)->capture;
    stream_of(handle)->capture = NULL;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    *status = stream_of(handle)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    return (CUresult)cudaStreamIsCapturing(handle, (enum cudaStreamCaptureStatus *)status);
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
    const cudaGraphEdgeData **data, size_t *count
) {
    cudaStreamIsCapturing(handle, status);
    if (id) *id = stream_of(handle)->id;
    if (graph) *graph = (cudaGraph_t)stream_of(handle)->capture;
    if (dependencies) *dependencies = NULL;
    if (data) *data = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    *executable = calloc(1, sizeof(struct graph));
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    static struct kernel *replay;
    if (replay == NULL) replay = new_kernel("cudaGraphLaunch", OTHER);
    launched(replay);
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = ((struct graph *)graph)->nodes;
    return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy, unsigned count, unsigned flags) {
    *object = calloc(1, sizeof(struct graph));
    return cudaSuccess;
}

// What Python sees of the record
static void (*callback)(const char *call);
static atomic_long synchronizations;

void null_gpu_set_callback(void (*function)(const char *call)) { callback = function; }

void first_launch(void) {
    void (*function)(const char *) = callback;
    if (function) function("first launch");
}

void synchronized(const char *call) {
    synchronizations++;
    void (*function)(const char *) = callback;
    if (function) function(call);
}
void print_synchronizations(FILE *file) { fprintf(file, "%ld", synchronizations); }

// Returns the counters since the start of the process as JSON. The caller frees the text.
char *null_gpu_counters(void) {
    char *text;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    fprintf(file, "{\"kernels\": ");
    print_kernels(file);
    fprintf(file, ", \"copies\": ");
    print_copies(file);
    fprintf(file, ", \"memory\": ");
    print_memory(file);
    fprintf(file, ", \"synchronizations\": ");
    print_synchronizations(file);
    fprintf(file, ", \"communicators\": ");
    print_communicators(file);
    fprintf(file, "}");
    fclose(file);
    return text;
}
