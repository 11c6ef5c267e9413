"""Checkpoint files as bytes: read and written a megabyte at a time, without building tensors.

    safetensors_io      safetensors files: read a tensor's rows
    safetensors_writer  the same, written in shards with their index
    torch_dist          Megatron's torch_dist folders: the chunks in ``*.distcp``, read
    torch_dist_writer   the same, written
    metadata            their ``.metadata``: which key has which chunks
    archive, pickles    the parts of torch_dist: torch.save archives, and pickles
    dtypes, pieces      dtypes of stored tensors, FP8 and MXFP4; bytes between files

Why not the readers and writers of torch and safetensors: ``torch.load`` copies a tensor twice and does not
check the archive's checksums; ``torch.save`` wants the tensor whole in memory. Both, and
torch.distributed.checkpoint, take seconds to import and run pickles; only writing a checkpoint imports them,
for the classes of its metadata. A memory map makes the whole file
resident and does not say that a file is cut. Here memory is a megabyte per worker at any model size, the time
about that of `cp`, and a pickle that names an unknown class is refused.

Checked with torch 2.13.0 and megatron-core 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12, 3.13): tests/conv
lets megatron-core load what is written here, and reads here what it saves.
"""
