"""Media front-ends: files, bytes, arrays and streams in, upright RGB frames or mono sound out.

The modules of this folder know pictures, limits and sampling; `video` builds on them, `live` on
both; `audio` and `codecs` hold what belongs to sound.
"""
