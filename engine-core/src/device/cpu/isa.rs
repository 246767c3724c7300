//! Which kernels run: chosen once at load, by what the machine has or by what is forced.

use crate::device::DeviceError;

/// Instruction sets that kernels exist for, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain loops: the specification that the others must equal.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
}

impl Isa {
    /// All, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The name that forces it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this machine can run it.
    #[must_use]
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Scalar => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                Self::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Scalar
        }
    }

    /// The fastest that this machine can run.
    #[must_use]
    pub fn best() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.available()).unwrap_or(Self::Scalar)
    }

    /// The one that is asked for, or the best: `asked` first, then `PAWL_CPU_ISA`.
    ///
    /// # Errors
    /// [`DeviceError::Isa`] for an unknown name, and for one that this machine lacks.
    pub fn choose(asked: Option<&str>) -> Result<Self, DeviceError> {
        let from_env = std::env::var("PAWL_CPU_ISA").ok();
        match asked.or(from_env.as_deref()) {
            None | Some("" | "auto") => Ok(Self::best()),
            Some(name) => Self::ALL
                .into_iter()
                .find(|isa| isa.as_str() == name && isa.available())
                .ok_or_else(|| DeviceError::Isa { asked: name.to_owned(), available: names() }),
        }
    }
}

fn names() -> String {
    let available: Vec<_> =
        Isa::ALL.into_iter().filter(|isa| isa.available()).map(Isa::as_str).collect();
    available.join(", ")
}

/// Compiles one portable body for each instruction set and calls the one asked for. The body is
/// ordinary Rust without reassociation, so every twin computes the same bits; only the width of the
/// vectors that the compiler makes of its loops differs.
macro_rules! isa_twins {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident ( $($arg:ident : $ty:ty),* $(,)? )) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::device::cpu::isa::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) { $body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) { $body($($arg),*) }
            match isa {
                $crate::device::cpu::isa::Isa::Scalar => $body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` beyond Scalar is only made where the machine has its features.
                $crate::device::cpu::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::device::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => $body($($arg),*),
            }
        }
    };
}
pub(crate) use isa_twins;
