// Pinned prefixes, LoRA adapters, and for how long instances were used.

import { button, confirmed } from "./actions.js";
import { ask } from "./api.js";
import { el, number, redraw, table } from "./dom.js";

// Token ids as little-endian uint32, in base64.
function packed(text) {
  const words = text.split(/[\s,]+/).filter(Boolean);
  const wrong = words.find((word) => !/^\d{1,10}$/.test(word) || Number(word) >= 2 ** 32);
  if (wrong !== undefined) throw new Error(`${wrong.slice(0, 40)} is not a token id`);
  const view = new DataView(new ArrayBuffer(4 * words.length));
  words.forEach((word, n) => view.setUint32(4 * n, Number(word), true));
  return btoa(
    Array.from(new Uint8Array(view.buffer), (byte) => String.fromCharCode(byte)).join(""),
  );
}

async function addPin() {
  const values = await confirmed({
    title: "Pin a prefix?",
    text: "Its KV is not evicted. A pin of the same name is replaced. `pdmesh pins add --system FILE` turns a text into token ids itself.",
    fields: [
      { name: "pin_id", label: "Name: a-z, 0-9, -", required: true },
      { name: "ids", label: "Token ids, with spaces or commas", required: true },
      { name: "tenant", label: "Tenant of the prompts", value: "default" },
      { name: "scenario", label: "Only at this scenario's instances; empty: all" },
      { name: "model", label: "Model; empty: the only one" },
      { name: "cache_salt", label: "cache_salt of the prompts; empty: none" },
      { name: "hours", label: "For how many hours", type: "number", value: 24, required: true },
      { name: "reason", label: "Reason, for the record" },
    ],
    verb: "Pin",
  });
  if (!values) return null;
  const { ids, hours, ...fields } = values;
  const { pin } = await ask("AddPin", {
    ...fields,
    prefix_token_ids: packed(ids),
    ttl_s: Math.round(3600 * Number(hours)),
  });
  return `${pin.pin_id}: ${pin.num_tokens} tokens are pinned`;
}

async function addAdapter() {
  const values = await confirmed({
    title: "Serve an adapter?",
    text: "Clients may ask for it by its name. One of the same name is replaced.",
    fields: [
      { name: "name", label: "Name for clients: letters, digits, - and _", required: true },
      { name: "path", label: "Its folder, as instances see it", required: true },
      { name: "model", label: "Model; empty: the only one" },
    ],
    verb: "Serve",
  });
  if (!values) return null;
  const answer = await ask("AddAdapter", values);
  return `${answer.adapter.name} is served; ${answer.instance_ids.join(", ")} looked at it`;
}

const remover = (method, key, name, text) =>
  button("Remove", method, `remove:${key}:${name}`, async () => {
    if (!(await confirmed({ title: `Remove ${name}?`, text, verb: "Remove", isSerious: true })))
      return null;
    await ask(method, key === "pin" ? { pin_id: name } : { name });
    return `${name} was removed`;
  });

function held(coverage) {
  if (!coverage.num_blocks) return `not under ${coverage.model_fingerprint}: add it again`;
  const holders = coverage.holders.map(
    (each) => `${each.instance_id} ${each.num_blocks}/${coverage.num_blocks}`,
  );
  return holders.join(", ") || `no instance yet, of ${coverage.num_blocks} blocks`;
}

const pins = (list) =>
  table(
    "pins",
    ["pin", "tenant", "scenario", "model", "tokens", "in host pools", "until", "reason", "actions"],
    list.map((pin) => [
      pin.pin_id,
      pin.tenant,
      pin.scenario || "all",
      pin.model,
      String(pin.num_tokens),
      pin.coverage.map(held).join("; "),
      new Date(pin.until).toLocaleString(),
      pin.reason,
      remover("RemovePin", "pin", pin.pin_id, "Its blocks are treated like any others."),
    ]),
    "no prefix is pinned",
  );

const adapters = (list) =>
  table(
    "adapters",
    ["adapter", "model", "rank", "MiB", "folder", "loaded at", "actions"],
    list.map(({ adapter, instance_ids }) => [
      adapter.name,
      adapter.model,
      String(adapter.rank),
      number(Number(adapter.num_bytes) / 2 ** 20),
      adapter.path,
      instance_ids.join(", ") || "no instance yet",
      remover(
        "RemoveAdapter",
        "adapter",
        adapter.name,
        "Requests that run end with it; new ones are refused.",
      ),
    ]),
    "no adapter is served",
  );

const usage = (book) =>
  table(
    "usage",
    ["service", "scenario", "group", "pool", "instances now", "instance hours"],
    book.accounts.map((a) => [
      a.service,
      a.scenario,
      a.group_id,
      a.pool,
      String(a.num_instances),
      number(a.instance_s / 3600, 2),
    ]),
    "nothing is counted yet",
  );

async function usageOr() {
  try {
    return usage((await ask("GetUsage")).book);
  } catch (error) {
    if (error.reason !== "INVALID_REQUEST") throw error;
    return el("p", { class: "quiet" }, error.message); // without a desired state nothing is counted
  }
}

export async function drawStores(container, who) {
  const [pinned, served, used] = [
    (await ask("ListPins")).pins,
    (await ask("ListAdapters")).adapters,
    await usageOr(),
  ];
  redraw(container, { who, pinned, served, used: used.textContent }, () => [
    el("h3", {}, "Pinned prefixes ", button("Pin…", "AddPin", "add-pin", addPin)),
    pins(pinned),
    el("h3", {}, "LoRA adapters ", button("Serve…", "AddAdapter", "add-adapter", addAdapter)),
    adapters(served),
    el("h3", {}, "Usage"),
    used,
  ]);
}
