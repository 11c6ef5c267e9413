"""A library of two containers: code for 80, 90 and 100 in the first, for 90 in the second."""

import struct

from scripts.thin_gpu_library import thin


def entry(capability, code):
    return struct.pack("<HHIQIIII", 2, 257, 64, len(code), 0, 0, 0, capability).ljust(64, b"\1") + code


def container(*entries):
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(b"".join(entries))) + b"".join(entries)


def library(others):
    first = container(entry(80, others * 3), entry(90, b"hopper"), entry(100, others))
    by_chance = struct.pack("<I", 0xBA55ED50) + b"text"
    return b"ELF" + by_chance + first + b"between" + container(entry(90, b"again")) + b"end"


def test_code_of_one_capability_stays_and_every_other_byte_too():
    thinned = bytearray(library(b"code"))
    assert thin(thinned, 90) == len(b"hopper") + len(b"again")
    assert thinned == library(b"\0\0\0\0")
    assert thin(thinned, 75) == 0
