"""KV-cache policies, one per file; the import is what registers a policy."""

from mmfast.caches import fastkv as fastkv
from mmfast.caches import keyformer as keyformer
from mmfast.caches import keynorm as keynorm
from mmfast.caches import lookm as lookm
from mmfast.caches import quant as quant
from mmfast.caches import rekv as rekv
from mmfast.caches import resv as resv
from mmfast.caches import sink as sink
from mmfast.caches import snapkv as snapkv
from mmfast.caches import streamingvlm as streamingvlm
from mmfast.caches import window as window
from mmfast.caches import zipvl as zipvl
