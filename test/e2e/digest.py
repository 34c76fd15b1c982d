"""Recompute a session's digest chain: digest.py SESSION_ID EXPORTED_FILE"""
import hashlib
import sys

digest = hashlib.sha256(b"palimpsest/1 " + sys.argv[1].encode()).digest()
with open(sys.argv[2], "rb") as file:
    next(file)  # the header is no event
    for line in file:
        digest = hashlib.sha256(digest + line.rstrip(b"\n")).digest()
print(digest.hex())
