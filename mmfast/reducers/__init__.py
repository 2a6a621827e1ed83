"""Visual-token reducers, one method per file; the import is what registers a method."""

from mmfast.reducers import divprune as divprune
from mmfast.reducers import evs as evs
from mmfast.reducers import fastv as fastv
from mmfast.reducers import pool as pool
from mmfast.reducers import random as random
from mmfast.reducers import uniform as uniform
