"""Multi-token audio heads, one per file; importing this package registers them."""

from mmfast.heads import depth as depth
from mmfast.heads import groups as groups
from mmfast.heads import mctp as mctp
from mmfast.heads import mtp as mtp
from mmfast.heads import pair as pair
