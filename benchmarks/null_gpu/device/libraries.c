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
