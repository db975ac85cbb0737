// What an instance is and how it does, in words: one look for the drawing, the tables and the dialog.

import { cordonButton, drainButton, shown, uncordonButton } from "./actions.js";
import { el, lower, number } from "./dom.js";

export const roleOf = (look) => lower(look.role, "ROLE_");

// [word, class, sign]: no state is shown by its colour alone.
export function stateOf(look) {
  if (look.isGone) return ["gone", "bad", "✕"];
  if (look.health === "dead") return ["dead", "bad", "✕"];
  if (look.out_of_service) return ["out of service", "warn", "■"];
  if (look.fault_level >= 2 && !look.held_back) return ["faulty", "bad", "✕"];
  if (look.health === "suspect") return ["suspect", "warn", "▲"];
  if (look.is_draining) return ["draining", "warn", "▼"];
  if (look.is_usable) return ["ready", "good", "●"];
  return [lower(look.phase, "INSTANCE_PHASE_") || "starting", "quiet", "○"];
}

export const slotsText = (look) => `${look.num_slots_used} of ${look.num_slots} slots`;

export function stateText(look) {
  const [word, kind, sign] = stateOf(look);
  return el("span", { class: kind }, `${sign} ${word}`);
}

export function faultText(look) {
  if (!look.fault_level) return "";
  const held = look.held_back ? `, held back: ${look.held_back}` : "";
  return `level ${look.fault_level}: ${look.fault_reasons.join(", ")}${held}`;
}

export function actionsOf(look, outOfService) {
  const entry = outOfService.find((each) => each.instance_id === look.instance_id);
  if (look.isGone) return [];
  return entry
    ? [uncordonButton(entry)]
    : [drainButton(look.instance_id), cordonButton(look.instance_id)];
}

export function showInstance(look, outOfService) {
  const kvUsed = Number(look.num_kv_blocks) - Number(look.num_kv_blocks_free);
  const facts = [
    ["state", stateText(look)],
    ["role", roleOf(look)],
    ["group", look.group_id],
    ["scenario", look.scenario],
    ["model", look.model],
    ["region", look.region],
    ["load", look.num_slots ? slotsText(look) : ""],
    [
      "KV blocks",
      Number(look.num_kv_blocks)
        ? `${number(kvUsed, 0)} of ${number(look.num_kv_blocks, 0)} used`
        : "",
    ],
    ["fault", faultText(look)],
    ["out of service", look.out_of_service],
    ["incarnation", look.incarnation],
  ].filter(([, value]) => value);
  const list = el(
    "dl",
    {},
    facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
  shown(look.instance_id, [list, el("p", {}, actionsOf(look, outOfService))]);
}
