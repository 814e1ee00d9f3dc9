"""Laws that need no reference: a story of requests told in another way gives the same tokens."""

from conformance.metamorphic.judge import greedy_tokens_are_the_models as greedy_tokens_are_the_models
from conformance.metamorphic.judge import judge_metamorphic as judge_metamorphic
from conformance.metamorphic.judge import retold_stories as retold_stories
