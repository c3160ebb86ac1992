"""The tests. Importing them lets OpenMP's threads wait as those of an engine do, which is settled when torch is loaded.

Threads that spin keep the core that the tests of another process need.
"""

from forkpoint.worker.threads import wait_briefly

wait_briefly()
