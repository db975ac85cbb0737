// What the caller's role may do. The master decides; the page only says so before it is asked.

const ORDER = ["viewer", "operator", "admin"];
let caller = { who: "", role: "", needed: {} };

export function setCaller(next) {
  caller = next;
}

export const callerText = () =>
  caller.role ? `${caller.who}: ${caller.role}` : caller.who ? `${caller.who}: no role` : "";

// Why the caller may not call the method; empty: it may.
export function whyNot(method) {
  const needed = caller.needed[method];
  if (needed && ORDER.indexOf(caller.role) >= ORDER.indexOf(needed)) return "";
  return `${method} needs the role ${needed || "of nobody"}; yours is ${caller.role || "none"}`;
}
