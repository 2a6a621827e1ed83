"""KV-cache policies, one per file; the import is what registers a policy."""

from mmfast.caches import rekv as rekv
from mmfast.caches import resv as resv
from mmfast.caches import quant as quant
from mmfast.caches import sink as sink
from mmfast.caches import window as window
