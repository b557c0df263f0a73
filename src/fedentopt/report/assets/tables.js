// Texts by the numbers in them: 9 % before 10 %, mu=0.001 before mu=0.01.
const NUMBERS = /(\d+(?:\.\d+)?(?:e[+-]?\d+)?)/i;
const byNumbers = (x, y) => {
  const [left, right] = [x.split(NUMBERS), y.split(NUMBERS)];
  for (let i = 0; i < Math.min(left.length, right.length); i += 1) {
    const order = i % 2 ? Number(left[i]) - Number(right[i]) : left[i].localeCompare(right[i]);
    if (order) return order;
  }
  return left.length - right.length;
};

// Sorting by click or key on a column's button; empty cells stay at the end in both directions.
const sortTable = (button) => {
  const head = button.closest("th");
  const table = button.closest("table");
  const column = [...head.parentElement.children].indexOf(head);
  const numeric = button.dataset.sort === "number";
  const first = numeric ? "descending" : "ascending";
  const other = numeric ? "ascending" : "descending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  const value = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    return sign * (numeric ? Number(x) - Number(y) : byNumbers(x, y));
  };
  head.parentElement.querySelectorAll("th").forEach((cell) => cell.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(compare));
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-sort]");
  if (button) sortTable(button);
});

const copyText = async (button) => {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // Pages opened from disk may be refused the clipboard; selecting and copying still works.
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) copyText(button);
});

const cell = (tag, text, value, kind) => {
  const element = document.createElement(tag);
  element.textContent = text;
  element.dataset.value = value;
  if (kind) element.className = kind;
  if (tag === "th") element.scope = "row";
  return element;
};
