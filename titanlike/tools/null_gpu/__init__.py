"""A stand-in for CUDA on which programs run without a GPU.

It replaces the CUDA driver and runtime, cuBLAS, cuDNN and NCCL. Unmodified PyTorch runs on it: dispatch, the caching allocator,
autograd, `torch.compile`, Triton (which compiles for the selected GPU) and `ProcessGroupNCCL`. Kernels, copies and collectives
are counted and return at once; no kernel runs. docs/performance.md says how to use it.

PyTorch imports about 750 functions from CUDA's libraries. A library that defines them is loaded first (`LD_PRELOAD`) and replaces
them, except those of NVRTC, which compile the kernels that PyTorch has as source. `library.py` reads the names from the installed
PyTorch and builds the library from the C files in `device`, once per version, in `~/.cache/titanlike/null_gpu`.

A record has, for each step and each whole run: launches by kind and name, copies by direction, host synchronizations by place,
collectives by communicator, host time, peaks of memory and the bytes that each step leaves allocated, compiled graphs and graph
breaks, and the resources of compiled kernels. A step is the time between two calls of `step()` of the first optimizer.

Limits:

- Values: everything copied from the device is zero, including the values in checkpoints, and a program that branches on a value
  takes the branch for zero. Data copied to the device reads back unchanged until the next kernel launch, and functions that
  exchange objects between ranks, such as `broadcast_object_list`, work for objects of up to 64 KiB. All experts of titanlike's
  models get the same number of tokens.
- Time: ignore the tokens/s and the MFU that a program prints. Autotuning may choose another kernel than on a GPU. Bandwidth and
  races between kernels are not modeled, and a PyTorch profile has no device events.
- Synchronizations: every event is complete when it is queried. A program that queries before it waits, as titanlike does for the
  values of the previous step, shows no synchronization there.
- Memory: 512 MiB of each device are reserved for the CUDA context; allocations inside NVIDIA's libraries, such as NCCL's buffers,
  are not modeled.
- Order of collectives: the calls of the ranks on each communicator are compared when all ranks have ended, unless one process
  runs as rank 0 of many. Deadlocks between calls on different communicators are not detected.
- CUDA library functions that are not implemented report success and leave their outputs unchanged. The record does not list them.
- A launch during the capture of a CUDA graph counts as one launch, and so does a replay of the graph.
- `torch.nn.DataParallel` crashes. NVSHMEM is not tested.
"""
