"""Visual-token reducers, one method per file; the import is what registers a method."""

from mmfast.reducers import adaptinfer as adaptinfer
from mmfast.reducers import cdpruner as cdpruner
from mmfast.reducers import divprune as divprune
from mmfast.reducers import dycoke as dycoke
from mmfast.reducers import evs as evs
from mmfast.reducers import fastkv as fastkv
from mmfast.reducers import fastv as fastv
from mmfast.reducers import gemfilter as gemfilter
from mmfast.reducers import hiprune as hiprune
from mmfast.reducers import hired as hired
from mmfast.reducers import holitom as holitom
from mmfast.reducers import holitom_inner as holitom_inner
from mmfast.reducers import pixelprune as pixelprune
from mmfast.reducers import pool as pool
from mmfast.reducers import prumerge as prumerge
from mmfast.reducers import prumerge_plus as prumerge_plus
from mmfast.reducers import pyramiddrop as pyramiddrop
from mmfast.reducers import random as random
from mmfast.reducers import slimfer as slimfer
from mmfast.reducers import stc_pruner as stc_pruner
from mmfast.reducers import tome as tome
from mmfast.reducers import uniform as uniform
from mmfast.reducers import vidcom2 as vidcom2
from mmfast.reducers import visionzip as visionzip
