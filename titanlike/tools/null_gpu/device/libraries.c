// cuBLAS, cuDNN and the profiler: what PyTorch reads of their answers. Every other function of theirs is generated: see library.py.
#include "device.h"
#include <cublasLt.h>
#include <cudnn.h>
#include <cupti.h>

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int requested, cublasLtMatmulHeuristicResult_t *results, int *returned
) {
    memset(results, 0, sizeof *results);
    results->state = CUBLAS_STATUS_SUCCESS;
    *returned = 1;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

// The graph of an attention is built by PyTorch, and accepted. A query returns one engine, whose plan needs no workspace.
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor) {
    *descriptor = malloc(1);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    free(descriptor);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(
    const cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t requested, int64_t *count,
    void *elements
) {
    bool list = name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE || name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE || name == CUDNN_ATTR_ENGINE_KNOB_INFO;
    if (count) *count = list ? 0 : 1;
    if (elements && requested > 0 && !list) {
        if (type == CUDNN_TYPE_INT64) *(int64_t *)elements = 0;
        if (type == CUDNN_TYPE_INT32) *(int32_t *)elements = 0;
    }
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t arguments) {
    static struct kernel *kernel;
    if (kernel == NULL) kernel = new_kernel("cudnnBackendExecute", ATTENTION);
    launched(kernel);
    return CUDNN_STATUS_SUCCESS;
}

CUptiResult cuptiActivityGetNextRecord(uint8_t *buffer, size_t size, CUpti_Activity **record) { return CUPTI_ERROR_MAX_LIMIT_REACHED; }
CUptiResult cuptiGetVersion(uint32_t *version) { *version = CUPTI_API_VERSION; return CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult result, const char **text) { *text = "none"; return CUPTI_SUCCESS; }

// NVML, which PyTorch asks for the number of devices and for the fabric between them. Its header does not come with PyTorch.
enum { NVML_SUCCESS, NVML_NOT_SUPPORTED = 3 };
int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return NVML_SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = description()->devices; return NVML_SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(uintptr_t)(index + 1); return NVML_SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%08x-0000-0000-0000-000000000000", (unsigned)(uintptr_t)device);
    return NVML_SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { *count = 0; return NVML_SUCCESS; }
int nvmlDeviceGetGpuFabricInfoV(void *device, char *information) {
    memset(information + 4, 0, 25);  // after the version: the cluster, a status, the clique and a state, "not supported"
    return NVML_SUCCESS;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *information) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetP2PStatus(void *device, void *peer, int index, int *status) { return NVML_NOT_SUPPORTED; }
