"""What a server keeps of its clients between rounds, the same in every framework: its state on disk.

No federated learning framework is imported here; the adapters (`fedentopt.flower`, `fedentopt.nvflare`) say how clients
are asked and what is sent to them. The clients' side of it is `fedentopt.release`.
"""

from __future__ import annotations
