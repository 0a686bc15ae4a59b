"""Which MLPs of a model are experts, how a token finds them and what keeps them busy, as plain values.

    GPTConfig(..., experts=ExpertsConfig(num_experts=8, top_k=2))                 Mixtral: every block
    ExpertsConfig(128, top_k=1, router="switch", expert_every=2, capacity_factor=1.25)
    ExpertsConfig(256, 8, "deepseek", expert_width=2048, shared_experts=1, dense_first=3, bias_speed=1e-3)
    ExpertsConfig(64, 1, "switch", expert_every=2, shared_experts=1, pyramid_layers=2, pyramid_experts=128)

The last is DeepSpeed's PR-MoE: residual (a shared MLP beside the one chosen) and a pyramid (more experts in
the last layers). What is per row here, capacity and the balance loss, is per batch of a device in Switch
Transformer and per group in GShard; a row is a group that no layout of ranks cuts differently. No torch here.
"""

from dataclasses import dataclass

from minitrain.model.fields import Settings

ROUTERS = ("top_k", "switch", "gshard", "deepseek", "expert_choice", "balanced")
FIXED = {"switch": 1, "gshard": 2}  # routers that say themselves how many experts a token visits


@dataclass(frozen=True)
class ExpertsConfig(Settings):
    """Loss terms are sums over tokens, divided by the valid tokens of the batch like the loss itself."""

    num_experts: int = 8  # E of a layer that has experts, shared ones not counted
    top_k: int = 2  # of these a token visits
    router: str = "top_k"  # or switch, gshard, deepseek, expert_choice, balanced (moe/router.py)
    expert_width: int | None = None  # F of one expert; None: d_ff
    shared_experts: int = 0  # visited by every token: one MLP that is so many experts wide
    expert_every: int = 1  # every how many-th block has experts; 2: the second, the fourth, ...
    dense_first: int = 0  # so many blocks before the first that may have experts
    pyramid_layers: int = 0  # of the layers with experts, how many last ones have pyramid_experts
    pyramid_experts: int = 0  # E of these
    capacity_factor: float = 0.0  # room of an expert in a row, in mean loads; 0: nobody is dropped
    balance_alpha: float = 0.0  # weight of the auxiliary loss for equal loads, per row
    z_alpha: float = 0.0  # weight of the z-loss, which keeps scores small
    bias_speed: float = 0.0  # of deepseek: how much a step moves the bias of an expert
    route_nodes: int = 1  # of deepseek: the groups in which the experts stand
    node_limit: int = 0  # of deepseek: the groups that a token visits at most; 0: all
    route_scale: float = 1.0  # of deepseek: factor of the weights

    def __post_init__(self):
        self.check_types()
        self.check_choice("router", ROUTERS)
        self.check_least(1, "num_experts", "top_k", "expert_every", "route_nodes")
        self.check_least(
            0, "shared_experts", "dense_first", "pyramid_layers", "pyramid_experts", "node_limit"
        )
        self.check_least(0, "capacity_factor", "balance_alpha", "z_alpha", "bias_speed", "route_scale")
        if self.expert_width is not None:
            self.check_least(1, "expert_width")
        if bool(self.pyramid_layers) != bool(self.pyramid_experts):
            sizes = f"pyramid_layers = {self.pyramid_layers}, pyramid_experts = {self.pyramid_experts}"
            raise ValueError(f"{sizes}; a pyramid needs both")
        fewest = min(self.num_experts, self.pyramid_experts or self.num_experts)
        if self.top_k > fewest:
            cure = f"use 1 to {fewest}; shared experts have no number and come on top"
            raise ValueError(f"top_k = {self.top_k} of {fewest} experts; {cure}")
        if self.top_k != (wanted := FIXED.get(self.router, self.top_k)):
            raise ValueError(f"top_k = {self.top_k}; router {self.router!r} is for top_k = {wanted}")
        self._check_nodes()

    def _check_nodes(self):
        plain = ExpertsConfig.__dataclass_fields__
        for name in ("bias_speed", "route_nodes", "node_limit", "route_scale"):
            if self.router != "deepseek" and getattr(self, name) != plain[name].default:
                given = f"{name} = {getattr(self, name)}"
                raise ValueError(f"{given} is for router 'deepseek', not {self.router!r}")
        nodes, limit = self.route_nodes, self.node_limit or self.route_nodes
        if limit > nodes:
            raise ValueError(
                f"node_limit = {limit} of route_nodes = {nodes}; use at most {nodes}, or 0 for all"
            )
        for experts in {self.num_experts, self.pyramid_experts or self.num_experts}:
            if experts % nodes or self.top_k % limit or self.top_k // limit > experts // nodes:
                sizes = f"{experts} experts, route_nodes {nodes}, node_limit {limit}, top_k {self.top_k}"
                rule = "nodes divide the experts, the limit divides top_k, and top_k / limit stand on a node"
                raise ValueError(f"{sizes}: {rule}")

    def in_block(self, number: int, num_layers: int) -> int:
        """How many experts block `number` (from 1) of so many has; 0: its MLP is dense."""
        blocks = self.blocks(num_layers)
        if number not in blocks:
            return 0
        in_pyramid = number in blocks[len(blocks) - self.pyramid_layers :]
        return self.pyramid_experts if in_pyramid else self.num_experts

    def blocks(self, num_layers: int) -> list[int]:
        """The blocks with experts."""
        return list(range(self.dense_first + self.expert_every, num_layers + 1, self.expert_every))

    @property
    def whole_rows(self) -> bool:
        """Whether what happens to a token depends on the others of its row."""
        return bool(self.capacity_factor or self.balance_alpha) or self.router == "expert_choice"
