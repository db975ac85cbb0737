"""How long the parts of a mesh wait for one another: the table, and how its times nest.

The side that knows most reports first. A decode reports why a pull failed before its gateway counts
the leg as silent. A receiver reports a cut link before the whole time of the pull is over. The
diagram shows one hand-over, in seconds; each arrow is a bound:

    offered     accepted            turn                KV there         token
       |-ANSWER 3->|                  |                    |               |
       |           |-TRANSFER 4.5---->|-TRANSFER 4.5------>|               |
       |           |                  |-STALL 2-> no bytes |               |
       |           |                  |-SILENT 0.25> others use the link   |
       |           |                  |     ... 4.5 +STOP 0.5: the connection is aborted
       |           |                  |     ... 4.5 +PULL_GRACE 0.25: the host fails the leg
       |           |-LEG_STALL 5----->|-LEG_STALL 5------->|-LEG_STALL 5-->| the gateway leaves
    |-TICKET_LEASE 10, renewed each third while a receiver waits or pulls->| the sender frees

`tests/unit/core/test_deadlines.py` asserts the order. Where a setting exists, this is its default.
"""

from __future__ import annotations

from typing import Final

# --- the gateway, for one leg: core/request/machine.py, leg_silence.py ----------------------------

ANSWER_S: Final = 3.0  # for an instance to accept or reject an offer
LEG_STALL_S: Final = 5.0  # without work from an accepted leg or its engine
HAD_KV_S: Final = 0.5  # for a decode to report that it has all KV of a lost prefill (F3)

# --- the decode, for one pull: instance/legs/leg_life.py tells the engine -------------------------

TRANSFER_TIMEOUT_S: Final = 4.5  # for a pull to get its turn, and again to get its last byte
TRANSFER_STALL_S: Final = 2.0  # for a pull without any byte, once prefill is done
# The engine's host fails a leg about which its worker said nothing: engine/vllm/engine.py.
PULL_GRACE_S: Final = 0.25  # after TRANSFER_TIMEOUT_S
PROGRESS_EVERY_S: Final = 0.5  # gateways hear how far the engine is: instance/legs/host.py

# --- the receiver, for the end of one pull: core/kv/transfer/receiver.py --------------------------

STOP_S: Final = 0.5  # after the deadline, for a live sender's answer and its last bytes
SILENT_S: Final = 0.25  # a link without any bytes: long if it works, short compared with any stall
PULL_DRAIN_S: Final = 5.0  # to drain a pull that was given up

# --- the sender, for staged KV: core/kv/transfer/sender.py ----------------------------------------

TICKET_LEASE_S: Final = 10.0  # after this a ticket ends, unless it is pulled or renewed
RENEWALS_PER_LEASE: Final = 3  # by a receiver that waits or pulls
MAX_LEASES: Final = 30  # renewals end this many leases after the ticket's last layer

# --- the instance ---------------------------------------------------------------------------------

# For a prefill to wait for an encoder and fetch from it; after that it encodes the images itself.
# It shows no work meanwhile, so this is shorter than LEG_STALL_S: engine/awaited_embeddings.py.
ENCODE_WAIT_S: Final = 4.0
OUTBOX_STALL_S: Final = 10.0  # a gateway that reads nothing is cut: instance/legs/outbox.py
ENGINE_SLOW_S: Final = 5.0  # no answer to a ping and no layer: core/instance/engine_watchdog.py
ENGINE_HUNG_S: Final = 30.0  # after that the instance ends itself
