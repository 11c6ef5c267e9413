"""Zero the machine code of other GPUs in a CUDA library, so that it packs small for a slow way.

    python scripts/thin_gpu_library.py libtransformer_engine.so THIN.so [--capability 90] && xz THIN.so

The code of the wanted compute capability stays as released, and so does every header: the driver picks an
entry by its header and reads no other. Transformer Engine 2.20.2: 343 MB, packed 24 MB instead of 272.
"""

import argparse
import struct
from pathlib import Path

CONTAINER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of this header, bytes of the entries behind it."""
MAGIC = struct.pack("<I", 0xBA55ED50)
ENTRY = struct.Struct("<HHIQIIII")
"""Kind, version, bytes of this header, bytes of the code; three more; compute capability."""


def thin(library: bytearray, capability: int) -> int:
    """Zero all other code in place. Returns: the bytes of code that stay."""
    kept, place = 0, library.find(MAGIC)
    while place >= 0:
        _, version, header, size = CONTAINER.unpack_from(library, place)
        end = place + header + size
        if version != 1 or header != CONTAINER.size or end > len(library):  # these bytes by chance
            place = library.find(MAGIC, place + 1)
            continue
        entry = place + header
        while entry < end:
            _, _, own, length, *_, found = ENTRY.unpack_from(library, entry)
            if found == capability:
                kept += length
            else:
                library[entry + own : entry + own + length] = bytes(length)
            entry += own + length
        place = library.find(MAGIC, end)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--capability", type=int, default=90, help="90: H100 and H200")
    options = parser.parse_args()
    library = bytearray(options.library.read_bytes())
    if not (kept := thin(library, options.capability)):
        parser.error(f"{options.library} has no code for --capability {options.capability}")
    options.target.write_bytes(library)
    print(f"{kept} bytes of code for {options.capability} stay")


if __name__ == "__main__":
    main()
