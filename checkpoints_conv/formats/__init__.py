"""Checkpoint files as bytes: read and written a megabyte at a time, without building tensors.

    safetensors_io      reads rows of tensors from safetensors files
    safetensors_writer  writes safetensors files and their index
    torch_dist          reads blocks of tensors from Megatron's torch_dist folders
    torch_dist_writer   writes torch_dist folders
    metadata            reads ``.metadata`` of a torch_dist folder: the keys and their chunks
    archive, pickles    read and write torch.save archives, and read pickles, both parts of torch_dist
    dtypes              dtypes of stored tensors; decodes FP8 and MXFP4
    pieces              copies bytes between files

The readers and writers of torch and safetensors are not used, for these reasons. ``torch.load`` copies a
tensor twice and does not check the archive's checksums. ``torch.save`` needs the whole tensor in memory.
Both, and torch.distributed.checkpoint, take seconds to import and run pickles; only writing a checkpoint
imports them, for the classes of its metadata. A memory map makes the whole file resident and does not tell
that a file is cut. Here a worker needs a megabyte of memory at any model size, the time is about that of
`cp`, and a pickle that names an unknown class is refused.

Checked with torch 2.13.0 and megatron-core 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12, 3.13): tests/conv
lets megatron-core load what is written here, and reads here what it saves.
"""
