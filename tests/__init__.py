"""The tests. OpenMP decides how its threads wait when torch is loaded, so this is set before any test imports torch.

Threads that spin while they wait take the core that the tests of another process need.
"""

from forkpoint.worker.threads import wait_briefly

wait_briefly()
