"""Visual-token reducers, one method per file; the import is what registers a method."""

from mmfast.reducers import divprune as divprune
from mmfast.reducers import evs as evs
from mmfast.reducers import fastv as fastv
from mmfast.reducers import holitom as holitom
from mmfast.reducers import holitom_inner as holitom_inner
from mmfast.reducers import pool as pool
from mmfast.reducers import random as random
from mmfast.reducers import tome as tome
from mmfast.reducers import uniform as uniform
from mmfast.reducers import visionzip as visionzip
