"""What a server keeps of its clients between rounds, the same in every framework.

members      who has reported label counts, the selector that chooses among them, and how far sizes are believed
backoff      who failed and sits out
state_files  all of it on disk

No federated learning framework is imported here; the adapters (`fedentopt.flower`, `fedentopt.nvflare`) say how clients
are asked and what is sent to them. The clients' side of it is `fedentopt.release`.
"""

from __future__ import annotations
