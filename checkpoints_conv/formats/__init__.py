"""Checkpoint files as bytes: read and written a megabyte at a time, without building tensors.

    model_folder        a Hugging Face folder: config.json, the index, which files hold the weights
    safetensors_io      safetensors files: read a tensor's rows, write shards and their index
    torch_dist          Megatron's torch_dist folders: ``.metadata``, and the chunks in ``*.distcp``; read
    torch_dist_writer   the same, written
    nemo                NeMo's folders: torch_dist under other names, beside a description of the model
    archive, pickles    what torch_dist is made of: torch.save archives, and pickles
    dtypes, pieces      the dtypes of stored tensors; bytes between files

Why not torch's and safetensors' own readers and writers. ``torch.load`` copies a tensor twice and does not
check the archive's checksums; ``torch.save`` wants the tensor whole in memory. Both, and
torch.distributed.checkpoint, take seconds to import and run pickles. A memory map makes the whole file
resident and does not say that a file is cut. Here memory is a megabyte per worker at any model size, the time
about that of `cp`, and a pickle that names an unknown class is refused.

Checked with torch 2.13.0 and megatron-core 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12, 3.13): tests/conv
lets megatron-core load what is written here, and reads here what it saves.
"""
