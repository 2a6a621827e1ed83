"""Multi-token audio heads, one per file; importing this package registers them."""

from mmfast.heads import mctp as mctp
from mmfast.heads import mtp as mtp
