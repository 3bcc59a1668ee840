// A field above the list of arguments that hides those whose name and text do not contain what is typed.
document.addEventListener("DOMContentLoaded", () => {
  const section = document.getElementById("arguments-by-subject");
  if (!section) return;
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter the arguments";
  field.setAttribute("aria-label", field.placeholder);
  field.className = "argument-filter";
  section.querySelector("h2").after(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const subject of section.querySelectorAll(":scope > section")) {
      let shown = 0;
      for (const list of subject.querySelectorAll("dl")) {
        let texts = [];
        for (const part of [...list.children, null]) {
          if (part && (part.tagName === "DD" || !texts.length)) {
            texts.push(part);
            continue;
          }
          const text = texts.map((each) => each.textContent.toLowerCase()).join(" ");
          const fits = words.every((word) => text.includes(word));
          texts.forEach((each) => (each.hidden = !fits));
          shown += fits;
          texts = part ? [part] : [];
        }
      }
      subject.hidden = !shown;
    }
  });
});
