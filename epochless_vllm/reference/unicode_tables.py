"""Facts of Unicode that no release of Python states the way the tokenizers library reads them. Data only.

Each part of the library has Unicode tables of its own; those of release 0.23 are repeated here. General categories are
those of Unicode 16.0, on which its regular expressions rest: unicodedata, which every Python from 3.10 (Unicode 13.0)
on agrees with where it is old enough, and a table of what came later. ``INERT`` are code points younger than Unicode
9.0 that its normalizer leaves alone and Python's would reorder or compose.
"""

from __future__ import annotations

import functools
import sys
import unicodedata

_SINCE_13 = {
    "Cf": "890-891 13439-1343F",
    "Ll": (
        "1C8A 2C5F A7C1 A7CD A7D1 A7D3 A7D5 A7D7 A7D9 A7DB 10597-105A1 105A3-105B1 105B3-105B9 105BB-105BC "
        "10D70-10D85 1DF00-1DF09 1DF0B-1DF1E 1DF25-1DF2A"
    ),
    "Lm": (
        "8C9 A7F2-A7F4 10780-10785 10787-107B0 107B2-107BA 10D4E 10D6F 16D40-16D42 16D6B-16D6C 1AFF0-1AFF3 "
        "1AFF5-1AFFB 1AFFD-1AFFE 1E030-1E06D 1E4EB"
    ),
    "Lo": (
        "870-887 889-88E 8B5 8C8 C5D CDD 170D 171F 1B4C 9FFD-9FFF 105C0-105F3 10D4A-10D4D 10D4F 10EC2-10EC4 "
        "10F70-10F81 11071-11072 11075 1123F-11240 11380-11389 1138B 1138E 11390-113B5 113B7 113D1 113D3 "
        "11740-11746 11AB0-11ABF 11BC0-11BE0 11F02 11F04-11F10 11F12-11F33 12F90-12FF0 1342F 13441-13446 "
        "13460-143FA 16100-1611D 16A70-16ABE 16D43-16D6A 18CFF 1B11F-1B122 1B132 1B155 1DF0A 1E290-1E2AD "
        "1E4D0-1E4EA 1E5D0-1E5ED 1E5F0 1E7E0-1E7E6 1E7E8-1E7EB 1E7ED-1E7EE 1E7F0-1E7FE 2A6DE-2A6DF "
        "2B735-2B739 2EBF0-2EE5D 31350-323AF"
    ),
    "Lu": (
        "1C89 2C2F A7C0 A7CB-A7CC A7D0 A7D6 A7D8 A7DA A7DC 10570-1057A 1057C-1058A 1058C-10592 10594-10595 10D50-10D65"
    ),
    "Mc": (
        "CF3 1715 1734 113B8-113BA 113C2 113C5 113C7-113CA 113CC-113CD 113CF 1171E 11F03 11F34-11F35 "
        "11F3E-11F3F 11F41 1612A-1612C"
    ),
    "Mn": (
        "897-89F 8CA-8D2 C3C ECE 180F 1AC1-1ACE 1DFA 10D69-10D6D 10EFC-10EFF 10F82-10F85 11070 11073-11074 "
        "110C2 11241 113BB-113C0 113CE 113D0 113D2 113E1-113E2 11F00-11F01 11F36-11F3A 11F40 11F42 11F5A "
        "13440 13447-13455 1611E-16129 1612D-1612F 1CF00-1CF2D 1CF30-1CF46 1E08F 1E2AE 1E4EC-1E4EF "
        "1E5EE-1E5EF"
    ),
    "Nd": (
        "10D40-10D49 116D0-116E3 11BF0-11BF9 11F50-11F59 16130-16139 16AC0-16AC9 16D70-16D79 1CCF0-1CCF9 "
        "1E4F0-1E4F9 1E5F1-1E5FA"
    ),
    "No": "1D2C0-1D2D3",
    "Pd": "2E5D 10D6E",
    "Pe": "2E56 2E58 2E5A 2E5C",
    "Po": (
        "61D 1B4E-1B4F 1B7D-1B7F 2E53-2E54 10F86-10F89 113D4-113D5 113D7-113D8 116B9 11B00-11B09 11BE1 "
        "11F43-11F4F 12FF1-12FF2 16D6D-16D6F 1E5FF"
    ),
    "Ps": "2E55 2E57 2E59 2E5B",
    "Sc": "20C0",
    "Sk": "888 FBC2",
    "Sm": "10D8E-10D8F",
    "So": (
        "2427-2429 2FFC-2FFF 31E4-31E5 31EF FD40-FD4F FDCF FDFE-FDFF 1CC00-1CCEF 1CD00-1CEB3 1CF50-1CFC3 "
        "1D1E9-1D1EA 1F6DC-1F6DF 1F774-1F776 1F77B-1F77F 1F7D9 1F7F0 1F8B2-1F8BB 1F8C0-1F8C1 1F979 1F9CC "
        "1FA75-1FA77 1FA7B-1FA7C 1FA87-1FA89 1FA8F 1FAA9-1FAAF 1FAB7-1FABF 1FAC3-1FAC6 1FACE-1FACF "
        "1FAD7-1FADC 1FADF-1FAE9 1FAF0-1FAF8 1FBCB-1FBEF"
    ),
}
_SINCE_9 = (
    "7FD 897-89F 8CA-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1ACE 1DF6-1DFA A82C 105C9 105D2 105DA 105E4 10D24-10D27 "
    "10D69-10D6D 10EAB-10EAC 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382-11385 1138B 1138E "
    "11390-11391 113B8 113BB 113C2 113C5 113C7-113C9 113CE-113D0 1145E 11839-1183A 11930 11935 11938 "
    "1193D-1193E 11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45 11D97 11F41-11F42 1611E-16129 1612F 16D63 "
    "16D67-16D6A 16FF0-16FF1 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF"
)
_NUMERALS_SINCE_16 = "11DE0-11DE9 16FF4-16FF6"

Ranges = list[tuple[int, int]]
"""Inclusive ranges of code points, in order and apart."""


def _expand(text: str) -> Ranges:
    bounds = [part.split("-") for part in text.split()]
    return [(int(each[0], 16), int(each[-1], 16)) for each in bounds]


# White_Space of the Unicode character database; Python's own notion adds four separators of ASCII.
WHITE_SPACE = _expand("9-D 20 85 A0 1680 2000-200A 2028-2029 202F 205F 3000")
INERT = frozenset(chr(point) for first, last in _expand(_SINCE_9) for point in range(first, last + 1))


@functools.cache
def _ranges_by_category() -> dict[str, Ranges]:
    """Walk all code points once, a tenth of a second."""
    late = {
        point: name
        for name, text in _SINCE_13.items()
        for first, last in _expand(text)
        for point in range(first, last + 1)
    }
    ranges: dict[str, Ranges] = {}
    begin, current = 0, unicodedata.category("\0")
    for point in range(1, sys.maxunicode + 1):
        name = late.get(point) or unicodedata.category(chr(point))
        if name != current:
            ranges.setdefault(current, []).append((begin, point - 1))
            begin, current = point, name
    ranges.setdefault(current, []).append((begin, sys.maxunicode))
    return ranges


def points_of(name: str) -> Ranges:
    """Return the code points of a category (``Lu``), or of all that begin with a letter (``L``); none if unknown."""
    by_category = _ranges_by_category()
    return merge_ranges(
        [pair for category in by_category if category.startswith(name) for pair in by_category[category]]
    )


def numerals() -> Ranges:
    """Return what the library's Digits step takes for digits: numbers of any kind, as of Unicode 17.0."""
    return merge_ranges(points_of("N") + _expand(_NUMERALS_SINCE_16))


def merge_ranges(ranges: Ranges) -> Ranges:
    """Return the same code points, in order and apart."""
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def invert_ranges(ranges: Ranges) -> Ranges:
    """Return all other code points."""
    bounds = [-1, *(bound for pair in merge_ranges(ranges) for bound in pair), sys.maxunicode + 1]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    return [(before + 1, after - 1) for before, after in gaps if before + 1 < after]
